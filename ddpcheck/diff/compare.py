"""From two run folders to a finished comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ddpcheck.diff.approximate import RoundingResult, compare_within_rounding
from ddpcheck.diff.causes import batch_split_differences, cause_of, environment_differences
from ddpcheck.diff.exact import compare_exactly
from ddpcheck.diff.model import (
    FOLLOWING_STEPS,
    Comparison,
    DifferenceGrowth,
    DiffSource,
    DiffVerdict,
    FirstDifference,
    Method,
    RunInfo,
)
from ddpcheck.diff.run_input import RunInput, RunSummary, check_models, read_run, run_steps, summarize
from ddpcheck.errors import NotComparable
from ddpcheck.formatting import name_ranks

# Steps in the growth curve.
MOST_GROWTH = 200
_MOST_THEN = 20


def compare_runs(
    path_a: Path,
    path_b: Path,
    rtol: float | None = None,
    attempts: tuple[int | None, int | None] = (None, None),
) -> Comparison:
    """Bitwise if possible; otherwise, or if `rtol` is given, within rounding."""
    a, b = read_run("A", path_a, attempts[0]), read_run("B", path_b, attempts[1])
    summaries = summarize(a), summarize(b)
    check_models(*summaries)
    notes = _settings(a, b)
    not_exact = _not_exact_reason(a, b, summaries)
    if rtol is None and not not_exact:
        return _exact(a, b, summaries, notes)
    if not_exact:
        notes.append(not_exact)
    return _rounding(a, b, summaries, rtol, notes)


def _exact(
    a: RunInput, b: RunInput, summaries: tuple[RunSummary, RunSummary], notes: list[str]
) -> Comparison:
    result = compare_exactly(a, b)
    _need_common(result.compared, result.common, a, b)
    growth: list[DifferenceGrowth] = []
    if result.divergences and result.divergences[0].step >= 0 and _same_sketches(a, b):
        within = compare_within_rounding(a, b, summaries, None)
        growth = within.growth
        notes += _size_notes(within)
        result.divergences = _with_ratios(result.divergences, within.divergences)
    notes += _missing_ranks(a, b)
    return _comparison(
        Method.EXACT, a, b, summaries, result.divergences, dict(result.compared), growth, notes
    )


def _with_ratios(divergences: list[FirstDifference], within: list[FirstDifference]) -> list[FirstDifference]:
    """Add the ratio of the gradients to bitwise differences."""
    by_step = {(one.module, one.step): one for one in within if one.stage is DiffSource.REDUCED}
    extended = []
    for one in divergences:
        size = by_step.get((one.module, one.step))
        wanted = one.stage is DiffSource.REDUCED or (one.stage is DiffSource.LOCAL and one is divergences[0])
        if size is not None and wanted:
            one = replace(one, message=size.message, ratio=size.ratio, sudden=size.sudden)
        extended.append(one)
    return extended


def _missing_ranks(a: RunInput, b: RunInput) -> list[str]:
    """Notes on ranks without records, for example after a kill before wrapping."""
    missing = [(run.label, sorted(set(range(run.world_size)) - run.headers.keys())) for run in (a, b)]
    return [f"Run {label} has no records of {name_ranks(ranks)}." for label, ranks in missing if ranks]


def _rounding(
    a: RunInput, b: RunInput, summaries: tuple[RunSummary, RunSummary], rtol: float | None, notes: list[str]
) -> Comparison:
    if not _same_sketches(a, b):
        raise NotComparable(
            f"run A was recorded by ddpcheck {a.recorded_by} and run B by {b.recorded_by}: "
            "their sketches may be incompatible, and digests need the same number of ranks and the same hash"
        )
    missing = [run.label for run, summary in zip((a, b), summaries, strict=True) if not summary.sketched]
    if missing:
        raise NotComparable(
            f"run {missing[0]} has no gradient sketches (was it recorded with --gradients off, or did it not reach a "
            "backward?), and digests alone cannot distinguish rounding from a difference"
        )
    result = compare_within_rounding(a, b, summaries, rtol)
    _need_common(result.compared, result.common, a, b)
    return _comparison(
        Method.ROUNDING, a, b, summaries, result.divergences, dict(result.compared), result.growth, notes
    )


def _comparison(
    method: Method,
    a: RunInput,
    b: RunInput,
    summaries: tuple[RunSummary, RunSummary],
    divergences: list[FirstDifference],
    compared: Mapping[str, int],
    growth: list[DifferenceGrowth],
    notes: list[str],
) -> Comparison:
    first = divergences[0] if divergences else None
    then = _later_divergences(divergences)
    split = (
        []
        if first is None
        else batch_split_differences(summaries, _shares(a, b, summaries, max(0, first.step)))
    )
    runs = [_run_info(run, summary) for run, summary in zip((a, b), summaries, strict=True)]
    if runs[0].steps != runs[1].steps:
        shorter = min(runs[0].steps, runs[1].steps)
        notes = [
            *notes,
            f"Run A took {runs[0].steps} steps and run B {runs[1].steps}: the first {shorter} were compared.",
        ]
    return Comparison(
        verdict=DiffVerdict.AGREE if first is None else DiffVerdict.DIVERGED,
        method=method,
        a=runs[0],
        b=runs[1],
        first=first,
        cause="" if first is None else cause_of(method, first, compared),
        then=tuple(then[:_MOST_THEN]),
        suspects=() if first is None else (*split, *environment_differences(a, b, summaries)),
        compared=dict(compared),
        growth=tuple(_downsampled(growth)),
        notes=tuple(notes),
    )


def _later_divergences(divergences: list[FirstDifference]) -> list[FirstDifference]:
    """Divergences that follow the first one: the first of each stage in the next few steps."""
    if not divergences:
        return []
    first: dict[tuple[int, DiffSource], FirstDifference] = {}
    for divergence in divergences:
        if divergence.step <= divergences[0].step + FOLLOWING_STEPS:
            first.setdefault((divergence.module, divergence.stage), divergence)
    return list(first.values())[1:]


def _shares(
    a: RunInput, b: RunInput, summaries: tuple[RunSummary, RunSummary], step: int
) -> tuple[list[int], list[int]]:
    """Rows that each rank trained on in that step."""
    rows: list[list[int]] = []
    for run, described in zip((a, b), summaries, strict=True):
        module = next(iter(described.modules.values()))
        taken = next((one for one in run_steps(run, module) if one.step >= step), None)
        rows.append([taken.ranks[rank].rows for rank in sorted(taken.ranks)] if taken is not None else [])
    return rows[0], rows[1]


def _run_info(run: RunInput, summary: RunSummary) -> RunInfo:
    command = run.description.get("command")
    return RunInfo(
        path=str(run.folder),
        attempt=run.attempt,
        world_size=run.world_size,
        steps=summary.steps,
        torch=run.header().torch,
        device=run.header().device,
        command=tuple(map(str, command)) if isinstance(command, list) else (),
    )


def _not_exact_reason(a: RunInput, b: RunInput, summaries: tuple[RunSummary, RunSummary]) -> str:
    if a.world_size != b.world_size:
        return (
            f"Run A has {a.world_size} and run B {b.world_size} ranks, so results are not bitwise equal: "
            "gradients were compared within rounding."
        )
    if a.algorithms() != b.algorithms():
        return (
            "The runs use different hashes (xxhash is installed for one only, or devices differ): gradients "
            "were compared within rounding. DDPCHECK_HASH=multilinear makes digests comparable."
        )
    groups = [[module.group for module in summary.modules.values()] for summary in summaries]
    if groups[0] != groups[1]:
        return "The process groups of the runs differ: gradients were compared within rounding."
    return ""


def _settings(a: RunInput, b: RunInput) -> list[str]:
    every = [run.setting("every", 1) for run in (a, b)]
    if every[0] == every[1]:
        return []
    return [
        f"Run A was recorded every {every[0]} and run B every {every[1]} steps (--every): "
        "only steps that both recorded were compared."
    ]


def _same_sketches(a: RunInput, b: RunInput) -> bool:
    return a.recorded_by == b.recorded_by


def _need_common(compared: Mapping[str, int], common: int, a: RunInput, b: RunInput) -> None:
    if common >= 0 or compared:
        return
    every = [run.setting("every", 1) for run in (a, b)]
    why = f" (--every {every[0]} and {every[1]})" if every[0] != every[1] else ""
    raise NotComparable(f"the runs have no recorded step in common{why}: there is nothing to compare")


def _size_notes(within: RoundingResult) -> list[str]:
    """Whether rounding explains the difference of the gradients."""
    if not within.growth:
        return []
    beyond = next((one for one in within.growth if one.beyond), None)
    if beyond is not None:
        return [
            f"Reduced gradients differ by more than rounding explains from step {beyond.step} on "
            f"({beyond.relative:.2g} of their size, {beyond.tolerance:.2g} allowed)."
        ]
    worst = max(within.growth, key=lambda one: one.relative)
    return [
        f"Rounding explains the difference of the reduced gradients: at most {worst.relative:.2g} of their size, "
        f"at step {worst.step} ({worst.tolerance:.2g} allowed)."
    ]


def _downsampled(growth: list[DifferenceGrowth]) -> list[DifferenceGrowth]:
    if len(growth) <= MOST_GROWTH:
        return growth
    stride = -(-len(growth) // MOST_GROWTH)
    return [*growth[:-1:stride], growth[-1]]
