"""Measuring candidates of a model's stages on this machine, and keeping what wins."""
