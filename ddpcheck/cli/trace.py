"""`ddpcheck trace`: overlap, waiting times and stragglers in existing torch.profiler traces."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ddpcheck.errors import UsageError


def trace(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE",
            help="torch.profiler traces, one per rank: .json, .json.gz, a .tar of them, or a folder.",
            show_default=False,
        ),
    ],
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    merged: Annotated[
        Path | None,
        typer.Option(
            metavar="OUT",
            help="Write one Perfetto timeline of all ranks (.json or .json.gz).",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Show communication overlap, waiting times and stragglers in profiler traces.

    Reads traces that torch.profiler exported, with NCCL, RCCL or gloo. No run
    is needed. Files that cannot be used are listed, and the exit status is 1.

    \b
    Examples:
      ddpcheck trace rank0.json.gz
      ddpcheck trace traces/ --merged all-ranks.json.gz
      ddpcheck trace traces/ --json | jq '.ranks[] | {rank, exposed_ns, wait_ns}'
    """
    if merged is not None and not merged.name.endswith((".json", ".json.gz")):
        raise UsageError(f"--merged {merged}: the name must end in .json or .json.gz")
    from ddpcheck.traces.analyse import analyse
    from ddpcheck.traces.reader import load

    loaded = load(files)
    result = analyse(loaded.traces)
    if merged is not None:
        from ddpcheck.traces.merged import write_merged

        write_merged(loaded.traces, result, merged)
    if json:
        from ddpcheck.reports.json_report import trace_to_json

        typer.echo(trace_to_json(result, loaded.left_out), nl=False)
    else:
        from rich.console import Console

        from ddpcheck.reports.terminal.trace import render

        render(result, Console(), loaded.left_out, merged)
    if loaded.left_out:
        raise typer.Exit(1)
