"""How an artifact becomes a library."""
