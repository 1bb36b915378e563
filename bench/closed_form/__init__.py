"""How the closed form is trained and judged (DyGen; docs/papers/dygen.md)."""
