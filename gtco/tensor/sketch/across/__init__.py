"""Normalisation of rows whose elements lie apart."""
