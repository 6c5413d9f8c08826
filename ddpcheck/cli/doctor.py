"""`ddpcheck doctor`: check this machine, or the machines of a job, before the job starts."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Annotated

import typer

from ddpcheck.errors import UsageError

_PROBLEM_STATUS = 10


def doctor(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="LAUNCHER",
            help="The launcher of your ranks, without a script, after two dashes [default: check this machine only].",
            show_default=False,
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print facts and diagnoses as JSON.")] = False,
    python: Annotated[
        str, typer.Option(help="Python interpreter that ranks would use.", metavar="PATH", show_default=False)
    ] = "",
    out: Annotated[
        Path,
        typer.Option(help="Folder in which run folders would be created.", metavar="DIR", show_default=True),
    ] = Path("ddpcheck-runs"),
    wait: Annotated[
        float, typer.Option(help="With a launcher: wait up to N seconds for all ranks.", metavar="N")
    ] = 60.0,
) -> None:
    """Check this machine and its environment before you start a job.

    Checks torch and its backends, GPUs, the network interface that gloo and
    NCCL use, host names, limits, memory, whether ddpcheck can be injected into
    a rank, and environment variables that affect a job. With a launcher, all
    ranks are checked and compared, and hosts connect to each other. Run it on
    every node, as you would run the job.

    Exit status: 10 if there is a problem, the status of the launcher if it
    fails, 0 otherwise.

    \b
    Examples:
      ddpcheck doctor
      ddpcheck doctor -- torchrun --nproc-per-node 4
      ddpcheck doctor -- torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint host:29400
      srun python -m ddpcheck.doctor
    """
    if not (math.isfinite(wait) and 1 <= wait <= 3600):
        raise UsageError(f"--wait {wait:g}: give 1 to 3600 seconds")
    if command and python:
        raise UsageError(
            "--python does not work with a launcher, which chooses the interpreter; remove one of them"
        )
    from ddpcheck.launcher.rank_tools import check_job, check_machine

    report = check_job(command, out, wait) if command else check_machine(python or sys.executable, out)
    if json:
        typer.echo(report.to_json(), nl=False)
    else:
        from rich.console import Console

        from ddpcheck.reports.terminal.doctor import render

        render(report, Console())
    if report.has_problem:
        raise typer.Exit(_PROBLEM_STATUS)
