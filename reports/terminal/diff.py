"""Two runs side by side on the terminal: where they part first, then what shows it, then what may be behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from ddpcheck.diff.model import (
    Comparison,
    DifferenceGrowth,
    DiffVerdict,
    FirstDifference,
    Method,
    RunInfo,
    Value,
)
from ddpcheck.formatting import name_ranks
from ddpcheck.reports.safe_text import safe_line, shortened
from ddpcheck.reports.terminal.console import LABEL, QUIET, ReportConsole, indented
from ddpcheck.reports.verdict import counted

_MOST_VALUES = 12
_MOST_THEN = 8
_MOST_SUSPECTS = 12
_MOST_GROWTH = 10
# Command lines can be long; the whole of them is in the JSON.
_LONGEST = 160


def render(comparison: Comparison, console: Console) -> None:
    """Write `comparison` to `console`."""
    ink = ReportConsole(console)
    _verdict(ink, comparison)
    _sides(ink, comparison)
    if comparison.first is not None:
        _values(ink, comparison.first)
        _then(ink, comparison.then)
        _suspects(ink, comparison.suspects)
    _growth(ink, comparison)
    _compared(ink, comparison)
    for note in comparison.notes:
        ink.gap()
        ink.put(ink.text(note))


def _verdict(ink: ReportConsole, comparison: Comparison) -> None:
    first = comparison.first
    if first is None:
        within = "to the bit" if comparison.method is Method.EXACT else "within rounding"
        steps = counted(min(comparison.a.steps, comparison.b.steps), "step")
        ink.put(ink.text(f"The runs agree {within}, over {steps}", "bold green"))
        return
    ink.put(ink.text(f"The runs part {_place(first)}", "bold red"))
    if first.message:
        ink.put(ink.text(_sentence(first.message)), indent=2)
    ink.gap()
    ink.put(ink.labelled([("why", ink.text(comparison.cause))]), indent=2)


def _place(parting: FirstDifference) -> str:
    when = "after wrapping" if parting.step < 0 else f"at step {parting.step}"
    if parting.agreed_until is not None and parting.agreed_until < parting.step - 1:
        when += f" (last compared and equal at step {parting.agreed_until})"
    parts = [when, f"stage {parting.stage.value}", f"module {parting.module}"]
    if parting.parameter:
        parts.append(f"parameter {safe_line(parting.parameter)}")
    text = ", ".join(parts)
    if parting.differing > 1:
        text += f" and {parting.differing - 1} more of {parting.tensors}"
    return f"{text}, {name_ranks(parting.ranks)}"


def _sentence(text: str) -> str:
    return safe_line(text[:1].upper() + text[1:] + ".")


def _sides(ink: ReportConsole, comparison: Comparison) -> None:
    ink.gap()
    rows = [("run A", ink.text(_side(comparison.a))), ("run B", ink.text(_side(comparison.b)))]
    ink.put(ink.labelled(rows))


def _side(side: RunInfo) -> str:
    size = f"{counted(side.world_size, 'rank')}, {counted(side.steps, 'step')}"
    return f"{side.path}, attempt {side.attempt}: {size}, torch {side.torch}, {side.device}"


def _values(ink: ReportConsole, parting: FirstDifference) -> None:
    if not parting.values:
        return
    ink.gap()
    what = safe_line(parting.parameter or parting.stage.value)
    rows = [
        (
            safe_line(value.what),
            "" if value.rank is None else f"rank {value.rank}",
            *_shown(value),
        )
        for value in parting.values[:_MOST_VALUES]
    ]
    ink.put(ink.text(f"Values of {what}", LABEL), indented(ink.columns(("", "", "run A", "run B"), rows)))
    left_out = len(parting.values) - _MOST_VALUES
    if left_out > 0:
        ink.put(ink.text(f"and {left_out} more, in --json", QUIET), indent=2)


def _shown(value: Value) -> tuple[str, str]:
    """Both sides; numbers that differ late get the digits that tell them apart."""
    short = _text(value.a, 6), _text(value.b, 6)
    return short if short[0] != short[1] or value.a == value.b else (_text(value.a, 10), _text(value.b, 10))


def _text(value: Any, digits: int) -> str:
    if value is None:
        return "-"
    return f"{value:.{digits}g}" if isinstance(value, float) else shortened(safe_line(value), _LONGEST)


def _then(ink: ReportConsole, partings: Sequence[FirstDifference]) -> None:
    if not partings:
        return
    rows = [
        (
            "wrapping" if parting.step < 0 else parting.step,
            parting.stage.value,
            safe_line(parting.parameter or ""),
            f"{parting.differing} of {parting.tensors}" if parting.differing else "",
            safe_line(parting.message),
        )
        for parting in partings[:_MOST_THEN]
    ]
    ink.gap()
    headers = ("step", "stage", "parameter", "differ", "")
    ink.put(ink.text("What followed", LABEL), indented(ink.columns(headers, rows)))


def _suspects(ink: ReportConsole, suspects: Sequence[Value]) -> None:
    ink.gap()
    if not suspects:
        ink.put(ink.text("Nothing else that is on record differs between the runs.", QUIET))
        return
    rows = [(safe_line(one.what), *_shown(one)) for one in suspects[:_MOST_SUSPECTS]]
    ink.put(ink.text("What else differs", LABEL), indented(ink.columns(("", "run A", "run B"), rows)))
    left_out = len(suspects) - _MOST_SUSPECTS
    if left_out > 0:
        ink.put(ink.text(f"and {left_out} more, in --json", QUIET), indent=2)


def _growth(ink: ReportConsole, comparison: Comparison) -> None:
    """A few steps stand for all; the first that is beyond its tolerance is always among them."""
    growth = comparison.growth
    if not growth:
        return
    ink.gap()
    headers = ["step", "apart", "allowed"]
    rows: list[list[object]] = [
        [one.step, f"{one.relative:.2g}", f"{one.tolerance:.2g}"] for one in _some(growth)
    ]
    if any(one.beyond for one in growth):
        headers.append("")
        for row, one in zip(rows, _some(growth), strict=True):
            row.append(ink.text("beyond rounding" if one.beyond else "", "bold red"))
    title = ink.text("Reduced gradients: difference over size", LABEL)
    ink.put(title, indented(ink.columns(headers, rows)))


def _some(growth: Sequence[DifferenceGrowth]) -> list[DifferenceGrowth]:
    stride = -(-len(growth) // _MOST_GROWTH)
    beyond = next((number for number, one in enumerate(growth) if one.beyond), None)
    wanted = {*range(0, len(growth), stride), len(growth) - 1} | (set() if beyond is None else {beyond})
    return [growth[number] for number in sorted(wanted)]


def _compared(ink: ReportConsole, comparison: Comparison) -> None:
    ink.gap()
    counts = ", ".join(f"{stage} {count}" for stage, count in comparison.compared.items())
    until = ", up to two steps past the parting" if comparison.verdict is DiffVerdict.DIVERGED else ""
    exact = comparison.method is Method.EXACT
    ink.put(ink.labelled([("compared", ink.text(f"{counts}{until if exact else ''}"))]))
