"""`ddpcheck report`: a stored run again, for people or for programs."""

from __future__ import annotations

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
    json: Annotated[bool, typer.Option("--json", help="Print report.json instead.")] = False,
) -> None:
    """Show the report of a run again.

    \b
    Examples:
      ddpcheck report
      ddpcheck report ddpcheck-runs/20260131-101500-train --json
    """
    path = find_run(run)
    from ddpcheck.analysis.analyse import analyse_run

    result = analyse_run(path)
    if json:
        from ddpcheck.reports.json_report import to_json

        typer.echo(to_json(result), nl=False)
        return
    from rich.console import Console

    from ddpcheck.reports.terminal import render

    render(result, Console())
