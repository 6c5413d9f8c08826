"""Saved gradients on the terminal: local and reduced gradients, and the weights before and after the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console

from ddpcheck.analysis.allreduce.saved_gradients import SavedGradients, SavedParameter, SavedStage
from ddpcheck.formatting import name_ranks
from ddpcheck.reports.terminal.console import LABEL, ReportConsole

_MOST_RANKS = 8
# All parameters of a small model; the first ones of a large model.
_MOST_PARAMETERS = 40


def render_gradients(modules: Sequence[SavedGradients], console: Console) -> None:
    """Write all modules to `console`, parameter by parameter."""
    out = ReportConsole(console)
    for module in modules:
        out.put(out.text(_heading(module), LABEL))
        if module.missing:
            out.put(
                out.text(
                    f"no gradients of {name_ranks(module.missing)} were saved: the mean cannot be checked"
                )
            )
        for parameter in module.parameters[:_MOST_PARAMETERS]:
            out.gap()
            _print_parameter(out, parameter)
        more = len(module.parameters) - _MOST_PARAMETERS
        if more > 0:
            out.gap()
            out.put(out.text(f"and {more} more parameters, in the folder gradients"))


def _heading(module: SavedGradients) -> str:
    of_attempt = f", attempt {module.attempt}" if module.attempts > 1 else ""
    return f"Step {module.step}, module {module.module}{of_attempt}: {_agreement(module)}"


def _agreement(module: SavedGradients) -> str:
    if not any(parameter.reduced for parameter in module.parameters):
        return "no reduced gradients were saved"
    differ = sum(not parameter.reduced_equal for parameter in module.parameters)
    if differ:
        return f"reduced gradients differ in {differ} of {len(module.parameters)} parameters"
    return "reduced gradients are the same on all ranks" + (" that were saved" if module.missing else "")


def _print_parameter(out: ReportConsole, parameter: SavedParameter) -> None:
    shape = "x".join(map(str, parameter.shape)) or "scalar"
    out.put(out.text(f"{parameter.name} ({parameter.dtype} {shape})"))
    rows: list[tuple[str, str, str]] = []
    rows += _rows("weights before", parameter.before)
    rows += _rows("local gradient,", parameter.local, every=True)
    rows += _rows("reduced", parameter.reduced)
    rows += _rows("weights after", parameter.after)
    out.put(out.columns(("", "norm", "first values"), rows), indent=2)
    if parameter.off_mean is not None:
        out.put(out.text(f"reduced differs from the mean by at most {parameter.off_mean:.3g}"), indent=2)


def _rows(label: str, stages: Mapping[int, SavedStage], every: bool = False) -> list[tuple[str, str, str]]:
    """One row if all ranks have equal values, else one for each rank."""
    if not stages:
        return []
    if not every and len(set(stages.values())) == 1:
        return [(f"{label}, all ranks", *_numbers(next(iter(stages.values()))))]
    shown = sorted(stages)[:_MOST_RANKS]
    rows = [(f"{label} rank {rank}", *_numbers(stages[rank])) for rank in shown]
    if len(stages) > len(shown):
        rows.append((f"and {len(stages) - len(shown)} more ranks", "", ""))
    return rows


def _numbers(stage: SavedStage) -> tuple[str, str]:
    first = "  ".join(f"{x:.6g}" if isinstance(x, (int, float)) else str(x) for x in stage.first)
    return f"{stage.norm:.6g}", first
