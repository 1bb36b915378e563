"""The sizes of a library: how they are read, its parts and variants, and what these share."""
