"""Resizing of images."""
