"""Benchmarks of single kernels beside the limits of the machine and beside peers."""
