"""`ddpcheck collect`: the verdict on a run whose ranks another program has started."""

from __future__ import annotations

import math
from typing import Annotated, Any

import typer

from ddpcheck.cli.options import OUTPUT_OPTIONS, find_run, requested_outputs, with_options
from ddpcheck.config import Config
from ddpcheck.errors import UsageError


@with_options(*OUTPUT_OPTIONS, "json_copy", "fail_on", "allow_incomplete", "quiet")
def collect(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="Run folder, or the beginning of its name in ddpcheck-runs [default: latest].",
        ),
    ] = None,
    wait: Annotated[
        float, typer.Option(help="Wait up to N seconds for ranks that still write records.", metavar="N")
    ] = 10.0,
    exit_code: Annotated[
        int | None,
        typer.Option(help="Exit status of the job, if you know it.", metavar="N", show_default=False),
    ] = None,
    **settings: Any,
) -> None:
    """Report on a run whose ranks were started without `ddpcheck run`.

    For folders of `ddpcheck env`, `ddpcheck.ray` and `import ddpcheck.auto`.
    Writes report.json and marks the run as ended.

    Exit status: --exit-code if it is not 0; 10 if a finding reaches
    --fail-on; 1 if ranks still write records; 0 otherwise.

    \b
    Examples:
      ddpcheck collect /shared/runs/job7
      ddpcheck collect /shared/runs/job7 --wait 120 --html
    """
    if not (math.isfinite(wait) and wait >= 0):
        raise UsageError(f"--wait {wait:g}: give 0 or more seconds")
    config = Config.from_options(settings)
    outputs = requested_outputs(config)
    from ddpcheck.launcher import collect as collecting

    raise typer.Exit(collecting.collect(find_run(run), config, outputs, wait=wait, exit_code=exit_code))
