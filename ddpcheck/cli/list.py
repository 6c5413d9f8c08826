"""`ddpcheck list`: past runs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ddpcheck.cli.options import nearest_runs
from ddpcheck.errors import RunNotFound
from ddpcheck.records.reader import RUNS_FOLDER

# Version of what --json prints. 1 (2026-11): first version.
LIST_SCHEMA = 1


def list_runs(
    folder: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help=f"Folder with runs [default: {RUNS_FOLDER}].")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """List past runs, newest first.

    \b
    Examples:
      ddpcheck list
      ddpcheck list /shared/ddpcheck-runs --json
    """
    from ddpcheck.launcher.runs import past_runs

    runs_folder = folder or nearest_runs()
    if not runs_folder.is_dir():
        raise RunNotFound(
            f"there is no folder {str(runs_folder)!r}; create a run with `ddpcheck run -- COMMAND`, or give a folder"
        )
    try:
        runs = past_runs(runs_folder)
    except OSError as error:
        raise RunNotFound(
            f"the folder {str(runs_folder)!r} cannot be read: {(error.strerror or str(error)).lower()}"
        ) from None
    if not runs and any(runs_folder.iterdir()):
        raise RunNotFound(
            f"{str(runs_folder)!r} contains no runs; give the folder that holds the run folders"
        )
    if as_json:
        typer.echo(json.dumps({"schema": LIST_SCHEMA, "runs": [asdict(run) for run in runs]}, indent=1))
        return
    from rich.console import Console

    from ddpcheck.reports.terminal.run_list import render_list

    render_list(runs, str(runs_folder), Console())
