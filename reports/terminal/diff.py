"""A comparison of two runs on the terminal: the first difference, its values, and possible causes."""

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
from ddpcheck.reports.views.speed import speed_table

_MOST_VALUES = 12
_MOST_FOLLOWING = 8
_MOST_SUSPECTS = 12
_MOST_GROWTH = 10
_MOST_SPEED = 16
# Command lines can be long; the JSON has all of them.
_LONGEST = 160


def render(comparison: Comparison, console: Console) -> None:
    """Write `comparison` to `console`."""
    out = ReportConsole(console)
    _print_verdict(out, comparison)
    _print_runs(out, comparison)
    if comparison.first is not None:
        _print_values(out, comparison.first)
        _print_following(out, comparison.then)
        _print_suspects(out, comparison.suspects)
    _print_growth(out, comparison)
    _print_compared(out, comparison)
    out.table(speed_table(comparison.speed), most=_MOST_SPEED)
    for note in comparison.notes:
        out.gap()
        out.put(out.text(note))


def _print_verdict(out: ReportConsole, comparison: Comparison) -> None:
    first = comparison.first
    if first is None:
        within = "bit for bit" if comparison.method is Method.EXACT else "within rounding"
        steps = counted(min(comparison.a.steps, comparison.b.steps), "step")
        out.put(out.text(f"The runs agree {within} over {steps}", "bold green"))
        return
    out.put(out.text(f"The runs diverge {_location(first)}", "bold red"))
    if first.message:
        out.put(out.text(_sentence(first.message)), indent=2)
    out.gap()
    out.put(out.labelled([("why", out.text(comparison.cause))]), indent=2)


def _location(difference: FirstDifference) -> str:
    when = "after wrapping" if difference.step < 0 else f"at step {difference.step}"
    if difference.agreed_until is not None and difference.agreed_until < difference.step - 1:
        when += f" (last compared and equal at step {difference.agreed_until})"
    parts = [when, f"stage {difference.stage.value}", f"module {difference.module}"]
    if difference.parameter:
        parts.append(f"parameter {safe_line(difference.parameter)}")
    text = ", ".join(parts)
    if difference.differing > 1:
        text += f" and {difference.differing - 1} more of {difference.tensors}"
    return f"{text}, {name_ranks(difference.ranks)}"


def _sentence(text: str) -> str:
    return safe_line(text[:1].upper() + text[1:] + ".")


def _print_runs(out: ReportConsole, comparison: Comparison) -> None:
    out.gap()
    rows = [("run A", out.text(_run_text(comparison.a))), ("run B", out.text(_run_text(comparison.b)))]
    out.put(out.labelled(rows))


def _run_text(run: RunInfo) -> str:
    size = f"{counted(run.world_size, 'rank')}, {counted(run.steps, 'step')}"
    return f"{run.path}, attempt {run.attempt}: {size}, torch {run.torch}, {run.device}"


def _print_values(out: ReportConsole, difference: FirstDifference) -> None:
    if not difference.values:
        return
    out.gap()
    what = safe_line(difference.parameter or difference.stage.value)
    rows = [
        (
            safe_line(value.what),
            "" if value.rank is None else f"rank {value.rank}",
            *_value_texts(value),
        )
        for value in difference.values[:_MOST_VALUES]
    ]
    out.put(out.text(f"Values of {what}", LABEL), indented(out.columns(("", "", "run A", "run B"), rows)))
    more = len(difference.values) - _MOST_VALUES
    if more > 0:
        out.put(out.text(f"and {more} more, in --json", QUIET), indent=2)


def _value_texts(value: Value) -> tuple[str, str]:
    """Both values, with more digits for numbers that look equal with few."""
    short = _text(value.a, 6), _text(value.b, 6)
    return short if short[0] != short[1] or value.a == value.b else (_text(value.a, 10), _text(value.b, 10))


def _text(value: Any, digits: int) -> str:
    if value is None:
        return "-"
    return f"{value:.{digits}g}" if isinstance(value, float) else shortened(safe_line(value), _LONGEST)


def _print_following(out: ReportConsole, differences: Sequence[FirstDifference]) -> None:
    if not differences:
        return
    rows = [
        (
            "wrapping" if difference.step < 0 else difference.step,
            difference.stage.value,
            safe_line(difference.parameter or ""),
            f"{difference.differing} of {difference.tensors}" if difference.differing else "",
            safe_line(difference.message),
        )
        for difference in differences[:_MOST_FOLLOWING]
    ]
    out.gap()
    headers = ("step", "stage", "parameter", "differ", "")
    out.put(out.text("Next differences", LABEL), indented(out.columns(headers, rows)))


def _print_suspects(out: ReportConsole, suspects: Sequence[Value]) -> None:
    out.gap()
    if not suspects:
        out.put(out.text("Nothing else that was recorded differs between the runs.", QUIET))
        return
    rows = [(safe_line(one.what), *_value_texts(one)) for one in suspects[:_MOST_SUSPECTS]]
    out.put(out.text("Other differences", LABEL), indented(out.columns(("", "run A", "run B"), rows)))
    more = len(suspects) - _MOST_SUSPECTS
    if more > 0:
        out.put(out.text(f"and {more} more, in --json", QUIET), indent=2)


def _print_growth(out: ReportConsole, comparison: Comparison) -> None:
    """A selection of steps; the first beyond its tolerance is always among them."""
    growth = comparison.growth
    if not growth:
        return
    out.gap()
    headers = ["step", "difference", "tolerance"]
    rows: list[list[object]] = [
        [one.step, f"{one.relative:.2g}", f"{one.tolerance:.2g}"] for one in _selected(growth)
    ]
    if any(one.beyond for one in growth):
        headers.append("")
        for row, one in zip(rows, _selected(growth), strict=True):
            row.append(out.text("beyond rounding" if one.beyond else "", "bold red"))
    title = out.text("Reduced gradients: relative difference", LABEL)
    out.put(title, indented(out.columns(headers, rows)))


def _selected(growth: Sequence[DifferenceGrowth]) -> list[DifferenceGrowth]:
    stride = -(-len(growth) // _MOST_GROWTH)
    beyond = next((number for number, one in enumerate(growth) if one.beyond), None)
    wanted = {*range(0, len(growth), stride), len(growth) - 1} | (set() if beyond is None else {beyond})
    return [growth[number] for number in sorted(wanted)]


def _print_compared(out: ReportConsole, comparison: Comparison) -> None:
    out.gap()
    counts = ", ".join(f"{stage} {count}" for stage, count in comparison.compared.items())
    until = (
        ", up to two steps after the first difference" if comparison.verdict is DiffVerdict.DIVERGED else ""
    )
    exact = comparison.method is Method.EXACT
    out.put(out.labelled([("compared", out.text(f"{counts}{until if exact else ''}"))]))
