"""A product's loop nest as one value."""
