"""Writing rows into a tensor where indices say."""
