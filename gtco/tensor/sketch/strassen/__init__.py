"""Strassen's seven products."""
