"""The table of time: each rank's step, part by part, with a bar, and what the ranks together come to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.text import Text

from ddpcheck.analysis.report import Report
from ddpcheck.analysis.timing.model import CrossCheck, RankTime, Refaults, Scaling, TimeTable
from ddpcheck.analysis.timing.straggler import KEEPS_MEMORY
from ddpcheck.formatting import name_ranks
from ddpcheck.reports.terminal.console import LABEL, QUIET, ReportConsole, indented
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


_MOST_RANKS = 8
# What the figures leave of 80 columns, and what is enough on a wider terminal.
_BAR = 18
_LONG_BAR = 40
# Letters tell the parts apart where there is no colour; they stand over the columns.
_PARTS = (
    ("data", "data", "d", "yellow"),
    ("forward", "fwd", "f", "green"),
    ("backward", "bwd", "b", "cyan"),
    ("optimizer", "opt", "o", "blue"),
    ("other", "other", ".", "dim"),
    ("wait", "wait", "!", "red"),
)


def put_time(ink: ReportConsole, report: Report) -> None:
    """Where the steps of the last attempt went."""
    for table in report.time:
        several = f", {name_ranks(table.group)}" if len(report.time) > 1 else ""
        pauses = f", {table.pauses} with a pause left out" if table.pauses else ""
        ink.gap()
        title = ink.text("Time of a step", LABEL)
        title.append(f"  ms, means of {table.steps} steps{several}{pauses}", QUIET)
        headers = ["rank", "step", *(f"{letter} {name}" for _, name, letter, _ in _PARTS), ""]
        shown = _shown(table)
        longest = max(row.step.mean_us for row in shown)
        width = min(max(ink.console.width - 80, 0) + _BAR, _LONG_BAR)
        rows = [_row(row, longest, width) for row in shown]
        ink.put(title, indented(ink.columns(headers, rows)))
        if len(shown) < len(table.ranks):
            ink.put(ink.text(f"the other {len(table.ranks) - len(shown)} ranks are in report.json"), indent=2)
        if table.refaults is not None:
            ink.put(ink.text(_refaults(table.refaults)), indent=2)
        if len(table.ranks) > 1:
            ink.put(ink.text(_scaling(table.scaling, len(table.ranks))), indent=2)
            if table.cross_check is not None:
                ink.put(ink.text(_cross_check(table.cross_check), QUIET), indent=2)


def _refaults(refaults: Refaults) -> str:
    return (
        f"up to {refaults.faults:,} page faults a step, {100 * refaults.share:.0f} % of the time in the kernel: memory "
        f"is given back and taken again. With {KEEPS_MEMORY} glibc keeps it."
    )


def _shown(table: TimeTable) -> list[RankTime]:
    """Of many ranks those that wait least and those that wait most."""
    if len(table.ranks) <= _MOST_RANKS:
        return list(table.ranks)
    ordered = sorted(table.ranks, key=lambda row: row.parts["wait"].median_us)
    ends = ordered[: _MOST_RANKS // 2] + ordered[-_MOST_RANKS // 2 :]
    return sorted(ends, key=lambda row: row.rank)


def _row(row: RankTime, longest: int, width: int) -> list[object]:
    amounts = [row.parts[part].mean_us for part, _, _, _ in _PARTS]
    means = {part: amount for (part, _, _, _), amount in zip(_PARTS, amounts, strict=True)}
    return [row.rank, _ms(row.step.mean_us), *map(_ms, amounts), step_bar(means, longest, width)]


def step_key() -> str:
    """What the letters of a bar stand for, in a few characters."""
    return " ".join(
        f"{letter}{name[1:]}" if letter.isalpha() else f"{letter}{name}" for _, name, letter, _ in _PARTS
    )


def step_bar(parts: Mapping[str, int], longest: int, width: int) -> Text:
    """One rank's step, part by part; `longest` fills the width."""
    drawn = Text(no_wrap=True)
    amounts = [parts.get(part, 0) for part, _, _, _ in _PARTS]
    for size, (_, _, letter, style) in zip(whole_cells(amounts, longest, width), _PARTS, strict=True):
        drawn.append(letter * size, style=style)
    return drawn


def _scaling(scaling: Scaling, ranks: int) -> str:
    parts = (
        ("compute", scaling.compute),
        ("data", scaling.data),
        ("other", scaling.other),
        ("exposed communication", scaling.exposed_communication),
        ("waiting for late ranks", scaling.waiting_for_stragglers),
    )
    shares = ", ".join(f"{name} {100 * share:.0f} %" for name, share in parts)
    return (
        f"{shares}\nscaling efficiency {100 * scaling.efficiency:.0f} %: {ranks} ranks do the work of "
        f"{scaling.speed_up:.2f}"
    )


def _cross_check(check: CrossCheck) -> str:
    return (
        f"cross-check: a mean wait of {_ms(check.wait_us)} ms, by DDP's own clock {_ms(check.ddp_wait_us)} ms"
    )


def _ms(microseconds: int) -> str:
    value = microseconds / 1000
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"
