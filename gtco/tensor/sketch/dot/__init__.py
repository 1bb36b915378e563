"""Contractions of few columns."""
