"""Depthwise convolutions, and convolutions in narrow groups."""
