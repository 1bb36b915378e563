"""Fused attention: two products and the softmax between them."""
