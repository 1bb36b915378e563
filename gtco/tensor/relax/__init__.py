"""Kernels of single operators through Relax, for the fallback."""
