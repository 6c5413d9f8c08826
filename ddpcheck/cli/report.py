"""`ddpcheck report`: a stored run again, for people or for programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ddpcheck.cli.run_folder import find_run


def report(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]", help="Run folder, or (part of) its name in ddpcheck-runs [default: latest]."
        ),
    ] = None,
    gradients: Annotated[
        int | None,
        typer.Option(metavar="STEP", min=0, help="Compare the gradients that were saved at this step."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print report.json instead.")] = False,
) -> None:
    """Show the report of a run again.

    \b
    Examples:
      ddpcheck report
      ddpcheck report ddpcheck-runs/20260131-101500-train --json
      ddpcheck report --gradients 10    (after run --save-gradients 10)
    """
    path = find_run(run)
    if gradients is not None:
        _show_gradients(path, gradients)
        return
    from ddpcheck.analysis.analyse import analyse_run

    result = analyse_run(path)
    if json:
        from ddpcheck.reports.json_report import to_json

        typer.echo(to_json(result), nl=False)
        return
    from rich.console import Console

    from ddpcheck.reports.terminal import render

    render(result, Console())


def _show_gradients(path: Path, step: int) -> None:
    from rich.console import Console

    from ddpcheck.analysis.saved_gradients import saved_gradients
    from ddpcheck.reports.gradients import render_gradients

    render_gradients(saved_gradients(path, step), Console())
