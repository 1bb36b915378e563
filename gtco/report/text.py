"""Numbers and names as the page shows them."""

from __future__ import annotations

NONE = "\N{EN DASH}"  # where a number is not known
TIMES = "\N{MULTIPLICATION SIGN}"


def middle(text: str, most: int) -> str:
    """The text, shortened in the middle to so many characters: names differ at their ends."""
    if len(text) <= most:
        return text
    head = (most - 1) // 2
    return f"{text[:head]}…{text[len(text) - (most - 1 - head) :]}"


def milliseconds(seconds: float | None) -> str:
    """Three digits or more: ``12.3 ms``, ``0.0312 ms``."""
    if seconds is None:
        return NONE
    value = 1e3 * seconds
    size = abs(value)
    digits = (
        0 if size >= 1000 else 1 if size >= 100 else 2 if size >= 1 else 3 if size >= 0.1 else 4
    )
    return f"{value:,.{digits}f} ms"


def percent(share: float | None) -> str:
    if share is None:
        return NONE
    if 0 < share < 0.0005:
        return "<0.1%"
    return f"{share:.1%}" if abs(share) < 0.0995 else f"{share:.0%}"


def error_text(error: float | None) -> str:
    """An error in percent: ``0.21 %``, ``128 %``."""
    if error is None:
        return "not known"
    percent = 100 * error
    return f"{percent:.2g} %" if percent < 99.5 else f"{percent:.0f} %"


def count(value: float | None, unit: str) -> str:
    """A count of bytes or FLOPs with a prefix: ``1.50 MB`` is 1,500,000."""
    if value is None:
        return NONE
    for prefix, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= scale:
            return (
                f"{value / scale:.3g} {prefix}{unit}"
                if abs(value) < 999.5 * scale
                else (f"{value / scale:.0f} {prefix}{unit}")
            )
    return f"{value:.0f} {unit}"


def nbytes(value: float | None) -> str:
    return count(value, "B")


def flops(value: float | None) -> str:
    return count(value, "FLOP")


def ratio(before: float | None, after: float | None) -> str:
    """How many times as fast: 1.25 and the sign."""
    return f"{before / after:.2f}{TIMES}" if before and after else NONE
