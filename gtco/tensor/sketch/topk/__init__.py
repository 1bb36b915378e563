"""Where the largest or least of each row lie."""
