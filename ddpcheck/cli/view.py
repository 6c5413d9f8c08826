"""`ddpcheck view`: show a run in TensorBoard, or its timeline in Perfetto."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from ddpcheck.cli.options import find_run
from ddpcheck.errors import UsageError

PERFETTO = "https://ui.perfetto.dev"


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
    perfetto: Annotated[
        bool,
        typer.Option("--perfetto", help="Show the timeline of the profiled ranks in Perfetto instead."),
    ] = False,
    perfetto_url: Annotated[
        str,
        typer.Option(metavar="URL", help="Address of a Perfetto of your own.", show_default=True),
    ] = PERFETTO,
) -> None:
    """Show a run in TensorBoard: replicas, gradients, time, memory and links per step.

    Writes the folder `tensorboard` in the run folder if it is missing or older
    than the records. Press Ctrl-C to stop.

    \b
    Examples:
      ddpcheck view
      ddpcheck view ddpcheck-runs/20260131-101500-train --port 7007
      ddpcheck view --perfetto          (after run --profile)
    """
    path = find_run(run)
    if perfetto:
        _show_in_perfetto(path, perfetto_url, port)
        return
    from ddpcheck.reports.outputs import INSTALL, has_profiler_plugin, require_tensorboard

    require_tensorboard()
    from ddpcheck.launcher.viewer import free_port, run_tensorboard

    chosen = free_port(port)
    with tempfile.TemporaryDirectory(prefix="ddpcheck-view-") as temporary:
        events = _events_folder(path, Path(temporary))
        if any(events.glob("*/*.pt.trace.json*")) and not has_profiler_plugin():
            typer.echo(
                f"ddpcheck: traces are not shown: torch-tb-profiler is not installed. Next: `{INSTALL}`, "
                "or `ddpcheck view --perfetto`, which needs nothing",
                err=True,
            )
        raise typer.Exit(run_tensorboard(events, path.absolute().name, chosen))


def _show_in_perfetto(run: Path, address: str, port: int | None) -> None:
    from ddpcheck.analysis.overlap.timeline import TIMELINE, write_timeline
    from ddpcheck.launcher.perfetto_server import is_address, serve_timeline
    from ddpcheck.launcher.viewer import free_port, wait_for_signal

    if not is_address(address):
        raise UsageError(
            f"--perfetto-url {address}: give an address such as {PERFETTO} or http://localhost:10000"
        )
    with tempfile.TemporaryDirectory(prefix="ddpcheck-view-") as temporary:
        timeline = Path(temporary) / TIMELINE
        ranks, left_out = write_timeline(run, timeline)
        for reason in left_out:
            typer.echo(f"ddpcheck: left out: {reason}", err=True)
        with serve_timeline(timeline, run.absolute().name, address, free_port(port)) as server:
            typer.echo(
                f"Open {server.url} to see the timeline of {ranks} ranks in Perfetto (press Ctrl-C to stop)"
            )
            typer.echo(
                f"From another machine: ssh -L {server.port}:localhost:{server.port} {os.uname().nodename}",
                err=True,
            )
            _open_browser(server.url)
            wait_for_signal()


def _open_browser(url: str) -> None:
    """Only with a display: the browser would otherwise be one in the terminal."""
    if os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        import webbrowser

        webbrowser.open(url)


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
