"""`ddpcheck env`: what a launcher has to set so that the workers it starts are checked."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ddpcheck.cli.options import with_options
from ddpcheck.config import Config, options
from ddpcheck.errors import UsageError

_OF_THE_FOLDER = ("out", "name", "job_id")
# These need a launcher of ours, which watches the ranks.
_OF_LAUNCHERS = {"fail_fast", "hang_timeout"}
# The last one becomes `profile`, which the ranks read.
_OF_RANKS = (
    *(name for name, declared in options() if declared.for_ranks and name not in _OF_LAUNCHERS),
    "profile_default_steps",
)


@with_options(*_OF_THE_FOLDER, *_OF_RANKS)
def env(
    form: Annotated[
        Literal["bash", "json", "k8s", "python"],
        typer.Option("--format", help="How to print the variables: for `eval`, or as text to paste."),
    ] = "bash",
    print_only: Annotated[
        bool,
        typer.Option(
            "--print-only",
            help="Do not create the run folder: it exists only where the workers run, and they create it.",
        ),
    ] = False,
    package: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the ddpcheck package where the workers run [default: of this installation].",
            metavar="DIR",
            show_default=False,
        ),
    ] = None,
    **settings: Any,
) -> None:
    """Print what a launcher has to set so that ddpcheck checks its workers.

    For workers that ddpcheck cannot start: of a Ray cluster, of Spark or
    Dask, in the pods of a Kubernetes operator, in a notebook. All workers
    write into one run folder; `ddpcheck collect` then reports on it.

    \b
    Examples:
      eval "$(ddpcheck env --out /shared/runs/job7)"
      ddpcheck env --out /shared/runs/job7 --format k8s --print-only \\
          --package /opt/venv/lib/python3.12/site-packages/ddpcheck
      ddpcheck collect /shared/runs/job7
    """
    config = Config.from_options(settings)
    if print_only and (config.out is None or not config.out.is_absolute()):
        raise UsageError(
            "--print-only needs --out with an absolute path: the run folder as the workers see it"
        )
    from ddpcheck.launcher.worker_environment import (
        FORMATS,
        has_own_entries,
        prepare_run,
        worker_variables,
    )

    config = prepare_run(config, create=not print_only)
    typer.echo(FORMATS[form](worker_variables(config, package)), nl=False)
    if form != "bash" and has_own_entries():
        typer.echo(
            "ddpcheck: PYTHONPATH has further entries here; append them if the workers need them", err=True
        )
    typer.echo(f"ddpcheck: next, after the job: `ddpcheck collect {shlex.quote(config.run_dir)}`", err=True)
