"""Cuts a graph into stages: DPOF, its candidates and patterns, and fusion by rules beside it."""
