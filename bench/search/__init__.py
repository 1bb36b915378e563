"""Benchmarks of what decides: fusion, policies, the tuner, its learned cost model."""
