"""Cuts a graph into stages: DPOF, its candidates and patterns; fusion by rules for comparison."""
