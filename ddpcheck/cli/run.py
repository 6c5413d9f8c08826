"""`ddpcheck run`: watch a job, report on it, and exit by the verdict."""

from __future__ import annotations

import math
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from ddpcheck.cli.report_options import (
    Github,
    Html,
    Junit,
    Markdown,
    Tensorboard,
    checked_output,
    checked_page,
)
from ddpcheck.cli.run_options import RunOptions
from ddpcheck.errors import UsageError
from ddpcheck.reports.outputs import Outputs
from ddpcheck.step_ranges import parse_steps

# Three steps, once buckets are laid out anew and caches are warm.
PROFILED = "5:8"
_EXAMPLE = "ddpcheck run -- torchrun --nproc-per-node 4 train.py"


class Gradients(str, Enum):
    """How closely gradients are looked at."""

    OFF = "off"
    SKETCH = "sketch"
    FULL = "full"


class FailOn(str, Enum):
    """From which severity on a finding makes the exit status 10."""

    ERROR = "error"
    WARNING = "warning"
    NEVER = "never"


def run(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="COMMAND", help="The job, exactly as you start it, after two dashes."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Run folder [default: ddpcheck-runs/<time>-<name>].", metavar="DIR")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run, part of its folder's name.")] = None,
    fail_on: Annotated[
        FailOn, typer.Option(help="Severity from which a finding fails the run.")
    ] = FailOn.ERROR,
    fail_fast: Annotated[
        bool, typer.Option("--fail-fast", help="Stop the job where ranks first disagree.")
    ] = False,
    every: Annotated[
        int, typer.Option(min=1, metavar="N", help="Compare parameters after every N steps.")
    ] = 1,
    optimizer_state: Annotated[
        bool,
        typer.Option("--optimizer-state", help="Compare the optimizers' state too (momenta and the like)."),
    ] = False,
    gradients: Annotated[
        Gradients,
        typer.Option(help="Look at gradients: not at all, by sketches, or keep every one of them whole."),
    ] = Gradients.SKETCH,
    save_gradients: Annotated[
        str,
        typer.Option(
            metavar="STEPS",
            help="Keep the gradients of these steps whole, as in 0,10:13.",
            show_default=False,
        ),
    ] = "",
    sketch_every: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="After the first 8 steps, check the AllReduce at every N-th step only: cheaper where "
            "parameters are many and arithmetic is little.",
        ),
    ] = 1,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile", help=f"Record steps {PROFILED} with torch.profiler: what hides, who waits."
        ),
    ] = False,
    profile_steps: Annotated[
        str,
        typer.Option(metavar="A:B", help="Record these steps instead, without B itself.", show_default=False),
    ] = "",
    hang_timeout: Annotated[
        float,
        typer.Option(
            min=0.0,
            metavar="SECONDS",
            help="Stop the job when its ranks have waited for each other for so long; 0: never.",
        ),
    ] = 300.0,
    sample_hz: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=20.0,
            metavar="HZ",
            help="Sample GPUs, interfaces and memory of the node so many times a second; 0: never.",
        ),
    ] = 2.0,
    html: Html = None,
    junit: Junit = None,
    markdown: Markdown = None,
    json: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write report.json here as well.", show_default=False),
    ] = None,
    github: Github = False,
    tensorboard: Tensorboard = False,
    run_id: Annotated[
        str,
        typer.Option(
            metavar="ID",
            help="What names the job on all its nodes [default: the rendezvous' or the scheduler's id].",
            show_default=False,
        ),
    ] = "",
    wait_nodes: Annotated[
        float,
        typer.Option(
            min=0.0,
            metavar="SECONDS",
            help="How long to wait at the end for the other nodes that work in the same run folder.",
        ),
    ] = 60.0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing where all is well.")] = False,
    live: Annotated[
        bool | None,
        typer.Option(
            "--live/--no-live",
            help="Show how the job fares in the terminal's last lines [default: on a terminal].",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Watch a DDP job, unchanged, and say whether its replicas agree.

    Exit status: the command's own where it failed; else 10 where a finding
    reaches --fail-on; else 0. Wrong usage is 2.

    \b
    Examples:
      ddpcheck run -- torchrun --nproc-per-node 4 train.py
      ddpcheck run --fail-on warning -- srun python train.py --epochs 3
      ddpcheck run --profile-steps 20:25 -- torchrun --nproc-per-node 4 train.py
    """
    if not command:
        raise UsageError(f"there is no command to watch: put it after two dashes, as in `{_EXAMPLE}`")
    options = RunOptions(
        out=out,
        name=_checked_name(name),
        fail_on=fail_on.value,
        fail_fast=fail_fast,
        every=every,
        optimizer_state=optimizer_state,
        gradients=gradients.value,
        sketch_every=sketch_every,
        hang_timeout=_checked_seconds(hang_timeout),
        save_gradients=_checked_steps(save_gradients, gradients),
        sample_hz=_checked_hz(sample_hz),
        profile=_checked_window(profile_steps, profile),
        quiet=quiet,
        live=live,
        outputs=Outputs(
            html=checked_page(html),
            junit=checked_output("--junit", junit),
            markdown=checked_output("--markdown", markdown),
            json=checked_output("--json", json),
            github=github,
            tensorboard=_checked_tensorboard(tensorboard),
            fail_on=fail_on.value,
        ),
        run_id=_checked_id(run_id),
        wait_nodes=wait_nodes,
    )
    from ddpcheck.launcher.run import run_watched

    raise typer.Exit(run_watched(command, options))


def _checked_name(name: str | None) -> str | None:
    if name is not None and (not name.strip(".") or not name.isprintable() or "/" in name):
        raise UsageError(f"--name {name!r} cannot be part of a folder's name: use letters, digits and dashes")
    return name


def _checked_tensorboard(wanted: bool) -> str | None:
    """Said before the job starts, where TensorBoard is missing."""
    if not wanted:
        return None
    from ddpcheck.reports.tensorboard.presence import require_tensorboard

    require_tensorboard()
    return ""


def _checked_id(run_id: str) -> str:
    if run_id and (not run_id.strip("-.") or not run_id.isprintable() or "/" in run_id):
        raise UsageError(f"--run-id {run_id!r} cannot name a folder: use letters, digits and dashes")
    return run_id


def _checked_seconds(seconds: float) -> float:
    """A second at the least: a rank needs a moment to answer. For ever is 0."""
    if not math.isfinite(seconds) or 0 < seconds < 1:
        raise UsageError(f"--hang-timeout {seconds:g}: give at least 1 second, or 0 to switch it off")
    return seconds


def _checked_hz(hz: float) -> float:
    """Once in ten seconds at the least: rarer samples would not be joined to steps."""
    if not math.isfinite(hz) or 0 < hz < 0.1:
        raise UsageError(f"--sample-hz {hz:g}: give a number from 0.1 to 20, or 0 to switch it off")
    return hz


def _checked_steps(steps: str, gradients: Gradients) -> str:
    try:
        chosen = parse_steps(steps)
    except ValueError as error:
        raise UsageError(f"--save-gradients: {error}") from None
    if chosen and gradients is Gradients.OFF:
        raise UsageError("--save-gradients needs to look at gradients: leave --gradients off out")
    return steps


def _checked_window(steps: str, wanted: bool) -> str:
    """One stretch of steps: a profiler that is switched on and off again and again disturbs more than it shows."""
    if not steps:
        return PROFILED if wanted else ""
    try:
        ranges = parse_steps(steps).ranges
    except ValueError as error:
        raise UsageError(f"--profile-steps: {error}") from None
    if len(ranges) != 1 or ranges[0][1] is None:
        raise UsageError(f"--profile-steps {steps}: give one range of steps with an end, such as {PROFILED}")
    return steps
