"""Sampling of images at points."""
