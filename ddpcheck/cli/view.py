"""`ddpcheck view`: TensorBoard on a run."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from ddpcheck.cli.run_lookup import find_run


def view(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]", help="Run folder, or (part of) its name in ddpcheck-runs [default: latest]."
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=1, max=65535, metavar="N", help="Port to listen on [default: the first free one from 6006]."
        ),
    ] = None,
) -> None:
    """Show a run in TensorBoard: agreement, gradients, time, memory and links of all ranks over the steps.

    What TensorBoard reads lies in the folder `tensorboard` of the run, and is
    made where it is missing or older than the records. Ctrl-C ends it.

    \b
    Examples:
      ddpcheck view
      ddpcheck view ddpcheck-runs/20260131-101500-train --port 7007
    """
    path = find_run(run)
    from ddpcheck.reports.tensorboard.presence import INSTALL, has_profiler_plugin, require_tensorboard

    require_tensorboard()
    from ddpcheck.launcher.viewer import free_port, show

    chosen = free_port(port)
    with tempfile.TemporaryDirectory(prefix="ddpcheck-view-") as spare:
        events = _events(path, Path(spare))
        if any(events.glob("*/*.pt.trace.json*")) and not has_profiler_plugin():
            typer.echo(
                f"ddpcheck: torch-tb-profiler, which shows the traces, is missing: `{INSTALL}`", err=True
            )
        raise typer.Exit(show(events, path.absolute().name, chosen))


def _events(run: Path, spare: Path) -> Path:
    """The folder that TensorBoard is to read, made where needed; in `spare` where the run folder cannot be written."""
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
        out = spare / TENSORBOARD
        write_tensorboard(report, run, out)
        typer.echo(f"ddpcheck: {run} cannot be written ({error.strerror}); {out} is used meanwhile", err=True)
    return out
