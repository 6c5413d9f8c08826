"""`ddpcheck doctor`: what of this machine and its environment would get in a job's way."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Annotated

import typer

from ddpcheck.errors import UsageError

_PROBLEM = 10


def doctor(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="LAUNCHER",
            help="What starts your ranks, without a script, after two dashes [default: this machine alone].",
            show_default=False,
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print facts and diagnoses as JSON instead.")] = False,
    python: Annotated[
        str, typer.Option(help="The Python that ranks would run with.", metavar="PATH", show_default=False)
    ] = "",
    out: Annotated[
        Path, typer.Option(help="Where a run folder would be made.", metavar="DIR", show_default=True)
    ] = Path("ddpcheck-runs"),
    wait: Annotated[float, typer.Option(help="Seconds for all ranks to report, with a launcher.")] = 60.0,
) -> None:
    """Look at this machine and its environment before a job starts on it.

    torch and its backends, GPUs, the interface that gloo and NCCL take, host
    names, limits, memory, whether ddpcheck gets into a rank, variables that
    change a job. With a launcher, every rank tells its facts, hosts call each
    other, and what differs is named; start it on every node as the job itself.

    Exit status: 10 where there is a problem, the launcher's own where it
    failed, else 0.

    \b
    Examples:
      ddpcheck doctor
      ddpcheck doctor -- torchrun --nproc-per-node 4
      ddpcheck doctor -- torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint host:29400
      srun python -m ddpcheck.doctor
    """
    if not (math.isfinite(wait) and 1 <= wait <= 3600):
        raise UsageError(f"--wait {wait:g}: give from 1 to 3600 seconds")
    if command and python:
        raise UsageError("--python is for this machine alone: with a launcher, ranks run with the launcher's")
    from ddpcheck.launcher.rank_tools import look_at_job, look_at_machine

    report = look_at_job(command, out, wait) if command else look_at_machine(python or sys.executable, out)
    if json:
        typer.echo(report.to_json(), nl=False)
    else:
        from rich.console import Console

        from ddpcheck.reports.terminal.doctor import render

        render(report, Console())
    if report.has_problem:
        raise typer.Exit(_PROBLEM)
