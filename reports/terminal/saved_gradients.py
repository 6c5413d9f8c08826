"""Saved gradients side by side: what each rank computed, what the reduction gave, what became of the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console

from ddpcheck.analysis.allreduce.saved_gradients import SavedGradients, SavedParameter, SavedStage
from ddpcheck.formatting import name_ranks
from ddpcheck.reports.terminal.console import LABEL, ReportConsole

_MOST_RANKS = 8
# In small models people want to see every number; in large ones the first parameters stand for the rest.
_MOST_PARAMETERS = 40


def render_gradients(modules: Sequence[SavedGradients], console: Console) -> None:
    """Write all modules to `console`, parameter by parameter."""
    ink = ReportConsole(console)
    for module in modules:
        ink.put(ink.text(_heading(module), LABEL))
        if module.missing:
            ink.put(ink.text(f"nothing was kept of {name_ranks(module.missing)}: no mean to compare with"))
        for parameter in module.parameters[:_MOST_PARAMETERS]:
            ink.gap()
            _parameter(ink, parameter)
        left_out = len(module.parameters) - _MOST_PARAMETERS
        if left_out > 0:
            ink.gap()
            ink.put(ink.text(f"and {left_out} more parameters, in the files of the folder gradients"))


def _heading(module: SavedGradients) -> str:
    of_attempt = f", attempt {module.attempt}" if module.attempts > 1 else ""
    return f"Step {module.step}, module {module.module}{of_attempt}: {_told(module)}"


def _told(module: SavedGradients) -> str:
    if not any(parameter.reduced for parameter in module.parameters):
        return "no reduced gradient was kept"
    differ = sum(not parameter.reduced_equal for parameter in module.parameters)
    if differ:
        return f"reduced gradients differ in {differ} of {len(module.parameters)} parameters"
    return "reduced gradients are the same on all ranks" + (" that were kept" if module.missing else "")


def _parameter(ink: ReportConsole, parameter: SavedParameter) -> None:
    shape = "x".join(map(str, parameter.shape)) or "scalar"
    ink.put(ink.text(f"{parameter.name} ({parameter.dtype} {shape})"))
    rows: list[tuple[str, str, str]] = []
    rows += _rows("weights before", parameter.before)
    rows += _rows("gradient of", parameter.local, every=True)
    rows += _rows("reduced", parameter.reduced)
    rows += _rows("weights after", parameter.after)
    ink.put(ink.columns(("", "norm", "first values"), rows), indent=2)
    if parameter.off_mean is not None:
        ink.put(ink.text(f"reduced is off the mean by {parameter.off_mean:.3g} at most"), indent=2)


def _rows(label: str, sides: Mapping[int, SavedStage], every: bool = False) -> list[tuple[str, str, str]]:
    """One row where all ranks hold the same, else one a rank."""
    if not sides:
        return []
    if not every and len(set(sides.values())) == 1:
        return [(f"{label}, all ranks", *_numbers(next(iter(sides.values()))))]
    shown = sorted(sides)[:_MOST_RANKS]
    rows = [(f"{label} rank {rank}", *_numbers(sides[rank])) for rank in shown]
    if len(sides) > len(shown):
        rows.append((f"and {len(sides) - len(shown)} more ranks", "", ""))
    return rows


def _numbers(side: SavedStage) -> tuple[str, str]:
    first = "  ".join(f"{x:.6g}" if isinstance(x, (int, float)) else str(x) for x in side.first)
    return f"{side.norm:.6g}", first
