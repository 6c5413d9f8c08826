"""A rank's time as one bar: what it computed, what of its communication was hidden, exposed, and what lay idle."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from ddpcheck.traces.model import Shares

# Letters tell the parts apart where there is no colour; the legend names both.
PARTS = (
    ("compute", "compute_alone_ns", "#", "green"),
    ("hidden comm", "overlap_ns", "=", "cyan"),
    ("exposed comm", "exposed_ns", "!", "red"),
    ("copies", "copy_ns", "c", "blue"),
    ("idle", "idle_ns", ".", "dim"),
)


def bar(shares: Shares, longest_ns: int, width: int) -> Text:
    """Ranks share one scale, so that the longest fills `width`."""
    amounts = [getattr(shares, attribute) for _, attribute, _, _ in PARTS]
    drawn = Text()
    for cells, (_, _, letter, style) in zip(whole_cells(amounts, longest_ns, width), PARTS, strict=True):
        drawn.append(letter * cells, style=style)
    return drawn


def legend() -> Text:
    """What the letters mean."""
    drawn = Text()
    for number, (name, _, letter, style) in enumerate(PARTS):
        drawn.append("   " if number else "")
        drawn.append(letter, style=style)
        drawn.append(f" {name}")
    return drawn


def whole_cells(amounts: Sequence[int], longest: int, width: int) -> list[int]:
    """Whole cells that end where the amounts end: rounding the ends, not the lengths, keeps the sum right."""
    ends, total = [], 0
    for amount in amounts:
        total += amount
        ends.append(round(width * total / longest) if longest else 0)
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]
