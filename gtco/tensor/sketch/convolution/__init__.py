"""Convolutions whose windows overlap, as products over gathered blocks of the image."""
