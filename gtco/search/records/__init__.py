"""Records: what was measured, kept in files, and what of it stands."""
