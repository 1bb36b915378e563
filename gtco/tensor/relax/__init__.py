"""Kernels of single operators by way of Relax, for the fallback."""
