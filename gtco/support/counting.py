"""Numbers of things in messages."""

from __future__ import annotations


def counted(number: int, what: str) -> str:
    """``1 input``, ``3 inputs``; ``what`` is one of them, whose plural ends in s."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
