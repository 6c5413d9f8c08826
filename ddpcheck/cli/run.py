"""`ddpcheck run`: run a job, report on it, and exit with a status for the verdict."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer

from ddpcheck.cli.options import requested_outputs, with_options
from ddpcheck.cli.project_settings import project_settings
from ddpcheck.config import Config
from ddpcheck.errors import UsageError

_EXAMPLE = "ddpcheck run -- torchrun --nproc-per-node 4 train.py"


@with_options()
def run(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="COMMAND", help="The command that starts your job, after two dashes."),
    ] = None,
    **settings: Any,
) -> None:
    """Run an unmodified DDP job and check that its replicas agree.

    Exit status: the status of the command if it fails; 10 if a finding
    reaches --fail-on; 0 otherwise. Wrong usage is 2.

    \b
    Examples:
      ddpcheck run -- torchrun --nproc-per-node 4 train.py
      ddpcheck run --fail-on warning -- srun python train.py --epochs 3
      ddpcheck run --profile-steps 20:25 -- torchrun --nproc-per-node 4 train.py
    """
    if not command:
        raise UsageError(f"no command given; put it after two dashes, for example `{_EXAMPLE}`")
    config = replace(Config.from_options(settings), ignore=project_settings().ignore)
    outputs = requested_outputs(config)
    from ddpcheck.launcher.run import run_job

    raise typer.Exit(run_job(command, config, outputs))
