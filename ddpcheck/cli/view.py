"""`ddpcheck view`: show a run in TensorBoard."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from ddpcheck.cli.options import find_run


def view(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="Run folder, or the beginning of its name in ddpcheck-runs [default: latest].",
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, metavar="N", help="Port [default: the first free one from 6006]."),
    ] = None,
) -> None:
    """Show a run in TensorBoard: replicas, gradients, time, memory and links per step.

    Writes the folder `tensorboard` in the run folder if it is missing or older
    than the records. Press Ctrl-C to stop.

    \b
    Examples:
      ddpcheck view
      ddpcheck view ddpcheck-runs/20260131-101500-train --port 7007
    """
    path = find_run(run)
    from ddpcheck.reports.outputs import INSTALL, has_profiler_plugin, require_tensorboard

    require_tensorboard()
    from ddpcheck.launcher.viewer import free_port, run_tensorboard

    chosen = free_port(port)
    with tempfile.TemporaryDirectory(prefix="ddpcheck-view-") as temporary:
        events = _events_folder(path, Path(temporary))
        if any(events.glob("*/*.pt.trace.json*")) and not has_profiler_plugin():
            typer.echo(
                f"ddpcheck: traces are not shown: torch-tb-profiler is not installed. Next: `{INSTALL}`",
                err=True,
            )
        raise typer.Exit(run_tensorboard(events, path.absolute().name, chosen))


def _events_folder(run: Path, temporary: Path) -> Path:
    """The folder for TensorBoard, written if needed; in `temporary` if the run folder is not writable."""
    from ddpcheck.reports.outputs import TENSORBOARD
    from ddpcheck.reports.tensorboard.folder import is_current

    out = run / TENSORBOARD
    if is_current(run, out):
        return out
    from ddpcheck.analysis.report_builder import analyse_run
    from ddpcheck.reports.tensorboard.folder import write_tensorboard

    report = analyse_run(run, course=True)
    try:
        write_tensorboard(report, run, out)
    except OSError as error:
        out = temporary / TENSORBOARD
        write_tensorboard(report, run, out)
        typer.echo(f"ddpcheck: cannot write to {run} ({error.strerror}); using {out} instead", err=True)
    return out
