"""`ddpcheck list`: the runs that are there."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ddpcheck.errors import RunNotFound
from ddpcheck.launcher.run_folder import RUNS_FOLDER

# Version of what --json prints. 1 (2026-11): first version.
LIST_SCHEMA = 1


def list_runs(
    folder: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help=f"Folder with runs [default: {RUNS_FOLDER}].")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it for programs.")] = False,
) -> None:
    """List past runs, the newest first.

    \b
    Examples:
      ddpcheck list
      ddpcheck list /shared/ddpcheck-runs --json
    """
    from ddpcheck.launcher.past_runs import past_runs

    where = folder or Path(RUNS_FOLDER)
    if not where.is_dir():
        raise RunNotFound(
            f"there is no folder {str(where)!r}: make a run with `ddpcheck run -- COMMAND`, or name a folder"
        )
    try:
        runs = past_runs(where)
    except OSError as error:
        raise RunNotFound(
            f"the folder {str(where)!r} cannot be read: {(error.strerror or str(error)).lower()}"
        ) from None
    if as_json:
        typer.echo(json.dumps({"schema": LIST_SCHEMA, "runs": [asdict(run) for run in runs]}, indent=1))
        return
    from rich.console import Console

    from ddpcheck.reports.terminal.run_list import render_list

    render_list(runs, str(where), Console())
