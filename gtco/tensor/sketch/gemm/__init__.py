"""Contractions: products of matrices, and all that is one of them in other words."""
