"""Contractions: products of matrices, and operators that are such a product in another form."""
