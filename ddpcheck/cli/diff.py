"""`ddpcheck diff`: the first step, stage and parameter where two runs diverge."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from ddpcheck.cli.options import find_run
from ddpcheck.errors import RunNotFound, RunUnreadable, UsageError

if TYPE_CHECKING:
    from ddpcheck.diff.model import Comparison

DIVERGED_STATUS = 10


def diff(
    run_a: Annotated[
        str,
        typer.Argument(metavar="RUN_A", help="Run folder, or the beginning of its name in ddpcheck-runs."),
    ],
    run_b: Annotated[str, typer.Argument(metavar="RUN_B", help="The run to compare it with.")],
    rtol: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Compare gradients with this relative tolerance instead of bitwise "
            "[default: bitwise; for different numbers of ranks, a tolerance by dtype and step].",
            show_default=False,
        ),
    ] = None,
    attempt: Annotated[
        str,
        typer.Option(
            metavar="N[,M]",
            help="Start of the job to compare, from 0: N of RUN_A and M of RUN_B [default: the last].",
            show_default=False,
        ),
    ] = "",
    fail_on_regression: Annotated[
        float | None,
        typer.Option(
            metavar="PERCENT",
            min=0,
            help="Exit with 10 only if step time or peak memory of RUN_B is this much worse, beyond noise.",
            show_default=False,
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON instead.")] = False,
) -> None:
    """Find the first step, stage and parameter where two runs diverge.

    Runs with the same number of ranks are compared rank by rank, bitwise.
    Other runs are compared by their reduced gradients, within rounding.

    Speed and memory are compared as well: what changed, and what is noise.

    Exit status: 0 if the runs agree, 10 if they diverge, 2 if they cannot
    be compared. With --fail-on-regression, the speed alone decides.

    \b
    Examples:
      ddpcheck diff 20260131-101500 20260131-104000
      ddpcheck diff one-rank four-ranks
      ddpcheck diff old-torch new-torch --rtol 1e-3 --json
      ddpcheck diff main branch --fail-on-regression 5
    """
    _check_rtol(rtol)
    attempts = _attempts(attempt)
    from ddpcheck.diff.compare import compare_runs
    from ddpcheck.diff.model import DiffVerdict
    from ddpcheck.diff.speed import compare_speed

    try:
        paths = find_run(run_a), find_run(run_b)
        comparison = replace(compare_runs(*paths, rtol, attempts), speed=compare_speed(*paths, attempts))
    except (RunNotFound, RunUnreadable) as error:
        # Status 2, not 1: scripts expect 0, 10, or 2 for runs that cannot be compared.
        raise UsageError(str(error)) from None
    if json:
        from ddpcheck.reports.json_report import diff_to_json

        typer.echo(diff_to_json(comparison), nl=False)
    else:
        from rich.console import Console

        from ddpcheck.reports.terminal.diff import render

        render(comparison, Console())
    if fail_on_regression is not None:
        raise typer.Exit(DIVERGED_STATUS if _regressed(comparison, fail_on_regression, json) else 0)
    raise typer.Exit(DIVERGED_STATUS if comparison.verdict is DiffVerdict.DIVERGED else 0)


def _regressed(comparison: Comparison, percent: float, quiet: bool) -> bool:
    from ddpcheck.diff.speed import LEAST_STEPS, regressions

    worse = regressions(comparison.speed, percent)
    if worse is None:
        # Not 0: a job that measured nothing must not pass as fast.
        raise UsageError(
            f"step times cannot be compared: each run needs {LEAST_STEPS} measured steps on all ranks"
        )
    names = ", ".join(figure.what for figure in worse)
    text = (
        f"Worse by more than {percent:g} %: {names}"
        if worse
        else f"Nothing is worse by more than {percent:g} %"
    )
    typer.echo(text, err=quiet)
    return bool(worse)


def _check_rtol(rtol: float | None) -> None:
    if rtol is not None and not (math.isfinite(rtol) and rtol > 0):
        raise UsageError(f"--rtol {rtol}: give a number above 0, such as 1e-4")


def _attempts(text: str) -> tuple[int | None, int | None]:
    if not text:
        return None, None
    parts = text.split(",")
    if len(parts) > 2 or not all(part.strip().isdecimal() for part in parts):
        raise UsageError(f"--attempt {text!r}: give one or two numbers, such as 0 or 0,1")
    return int(parts[0]), int(parts[-1])
