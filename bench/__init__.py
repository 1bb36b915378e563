"""Benchmarks: one file per claim, run as ``python -m bench NAME``; ``harness`` times systems side
by side.
"""
