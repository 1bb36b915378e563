"""Writing rows into a tensor at the places that indices give."""
