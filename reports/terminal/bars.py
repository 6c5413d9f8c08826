"""Bars of letters: one step of a rank by phase, and the profiled steps by compute and communication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.text import Text

from ddpcheck.reports.views.timing import PHASES
from ddpcheck.traces.model import Shares

# Letters distinguish the parts where there is no colour.
_SHARES = (
    ("compute", "compute_alone_ns", "#", "green"),
    ("hidden comm", "overlap_ns", "=", "cyan"),
    ("exposed comm", "exposed_ns", "!", "red"),
    ("copies", "copy_ns", "c", "blue"),
    ("idle", "idle_ns", ".", "dim"),
)
_PHASE_LETTERS = {
    "data": ("d", "yellow"),
    "forward": ("f", "green"),
    "backward": ("b", "cyan"),
    "optimizer": ("o", "blue"),
    "other": (".", "dim"),
    "wait": ("!", "red"),
}


def overlap_bar(shares: Shares, longest_ns: int, width: int) -> Text:
    """All ranks share one scale: `longest_ns` fills `width`."""
    amounts = [getattr(shares, attribute) for _, attribute, _, _ in _SHARES]
    return _bar(amounts, [(letter, style) for _, _, letter, style in _SHARES], longest_ns, width)


def overlap_legend() -> Text:
    """The meaning of the letters."""
    legend = Text()
    for number, (name, _, letter, style) in enumerate(_SHARES):
        legend.append("   " if number else "")
        legend.append(letter, style=style)
        legend.append(f" {name}")
    return legend


def step_bar(phases: Mapping[str, float], longest: float, width: int) -> Text:
    """One rank's step by phase; `longest` fills `width`."""
    amounts = [phases.get(phase, 0) for phase, _, _ in PHASES]
    return _bar(amounts, [_PHASE_LETTERS[phase] for phase, _, _ in PHASES], longest, width)


def step_legend(all_phases: bool = True) -> str:
    """The meaning of the letters: `data fwd bwd opt .other !wait`; without `all_phases` those that differ."""
    labels = [(_PHASE_LETTERS[phase][0], label) for phase, label, _ in PHASES]
    return " ".join(
        label if letter == label[0] else f"{letter}{label}"
        for letter, label in labels
        if all_phases or letter != label[0]
    )


def cell_counts(amounts: Sequence[float], longest: float, width: int) -> list[int]:
    """Cells for each amount; rounding the ends instead of the lengths keeps their sum right."""
    ends, total = [], 0.0
    for amount in amounts:
        total += amount
        ends.append(round(width * total / longest) if longest else 0)
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def _bar(amounts: Sequence[float], parts: Sequence[tuple[str, str]], longest: float, width: int) -> Text:
    bar = Text(no_wrap=True)
    for cells, (letter, style) in zip(cell_counts(amounts, longest, width), parts, strict=True):
        bar.append(letter * cells, style=style)
    return bar
