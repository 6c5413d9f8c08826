"""Formats sizes, times, rates and lists of ranks for messages."""

from __future__ import annotations

from collections.abc import Iterable


def size_text(size: float) -> str:
    """`8.2 MB`, in powers of ten."""
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
    """`188 Mbit/s` or `9.41 Gbit/s`. `rate` in bytes per second."""
    return f"{rate * 8e-9:.3g} Gbit/s" if rate >= 125e6 else f"{rate * 8e-6:.3g} Mbit/s"


def time_text(nanoseconds: int | None) -> str:
    """`46.9 ms` or `261 us`; empty for None."""
    if nanoseconds is None:
        return ""
    if abs(nanoseconds) >= 1_000_000_000:
        return f"{nanoseconds / 1e9:.2f} s"
    if abs(nanoseconds) >= 1_000_000:
        return f"{nanoseconds / 1e6:.1f} ms"
    return f"{nanoseconds / 1e3:.0f} us"


def optional_size_text(size: int | None) -> str:
    """`8.2 MB`, in powers of ten; empty for None."""
    return "" if size is None else size_text(size)


def rate_text(rate: float | None) -> str:
    """`32.1 GB/s`; empty for None. `rate` in GB per second."""
    if rate is None:
        return ""
    return f"{rate:.1f} GB/s" if rate >= 1 else f"{rate * 1000:.0f} MB/s"


def percent_text(percent: float) -> str:
    return f"{percent:.1f} %"


# Alternating ranks form no ranges: longer lists are cut.
_MOST_RANGES = 12


def rank_ranges(ranks: Iterable[int]) -> str:
    """`0-2, 7`; empty for no ranks."""
    return ", ".join(_parts(ranks))


def counted(number: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def name_ranks(ranks: Iterable[int]) -> str:
    """`rank 2`, `ranks 0-3 and 7` or `no rank`."""
    distinct = set(ranks)
    if not distinct:
        return "no rank"
    *first, last = _parts(distinct)
    text = f"{', '.join(first)} and {last}" if first else last
    return f"{'rank' if len(distinct) == 1 else 'ranks'} {text}"


def _parts(ranks: Iterable[int]) -> list[str]:
    spans = _spans(sorted(set(ranks)))
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in spans[:_MOST_RANGES]]
    left_out = sum(last - first + 1 for first, last in spans[_MOST_RANGES:])
    return [*shown, f"{left_out} more"] if left_out else shown


def _spans(ordered: list[int]) -> list[tuple[int, int]]:
    spans: list[tuple[int, int]] = []
    for rank in ordered:
        if spans and spans[-1][1] == rank - 1:
            spans[-1] = (spans[-1][0], rank)
        else:
            spans.append((rank, rank))
    return spans
