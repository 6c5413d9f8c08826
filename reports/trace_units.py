"""Times, sizes and rates as people read them."""

from __future__ import annotations


def time_text(nanoseconds: int | None) -> str:
    """`46.9 ms` or `261 us`; empty where nothing is known."""
    if nanoseconds is None:
        return ""
    if abs(nanoseconds) >= 1_000_000_000:
        return f"{nanoseconds / 1e9:.2f} s"
    if abs(nanoseconds) >= 1_000_000:
        return f"{nanoseconds / 1e6:.1f} ms"
    return f"{nanoseconds / 1e3:.0f} us"


def size_text(size: int | None) -> str:
    """`8.2 MB`, in powers of ten as links are sold; empty where nothing is known."""
    if size is None:
        return ""
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} B"


def rate_text(rate: float | None) -> str:
    """`32.1 GB/s`; empty where nothing is known."""
    if rate is None:
        return ""
    return f"{rate:.1f} GB/s" if rate >= 1 else f"{rate * 1000:.0f} MB/s"


def percent_text(percent: float) -> str:
    return f"{percent:.1f} %"
