"""Sizes and times as sentences say them."""

from __future__ import annotations


def size_text(size: float) -> str:
    """`8.2 MB`, in powers of ten as storage and links are sold."""
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size:.0f} B"


def seconds_text(seconds: float) -> str:
    """`1.25 s` or `38 ms`."""
    if seconds >= 100:
        return f"{seconds:.0f} s"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


def megabits_text(rate: float) -> str:
    """`188 Mbit/s` or `9.41 Gbit/s`, of bytes a second: as links are sold."""
    return f"{rate * 8e-9:.3g} Gbit/s" if rate >= 125e6 else f"{rate * 8e-6:.3g} Mbit/s"
