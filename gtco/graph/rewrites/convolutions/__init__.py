"""Rewrites of convolutions: of their filters, their pixels and what stands around them."""
