"""Benchmarks of whole models."""
