"""The cache of compiled libraries."""
