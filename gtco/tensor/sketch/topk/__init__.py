"""The places of the largest or least elements of each row."""
