"""`ddpcheck watch`: follow a run from another terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ddpcheck.cli.run_lookup import find_run

if TYPE_CHECKING:
    from rich.console import Console

    from ddpcheck.analysis.live.state import LiveState
    from ddpcheck.launcher.multi_node.remote_follow import RemoteFollow

_INTERRUPTED = 130


def watch(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]", help="Run folder, or (part of) its name in ddpcheck-runs [default: latest]."
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print how it stands now, and end.")] = False,
) -> None:
    """Follow a run that is under way, until it ends; then say how it came out.

    Reads the run folder and nothing else, so it works from any machine that
    sees the folder. Without a terminal it prints how the run stands, once.

    \b
    Examples:
      ddpcheck watch
      ddpcheck watch ddpcheck-runs/20260131-101500-train
      ddpcheck watch train --once
    """
    from rich.console import Console

    from ddpcheck.launcher.multi_node.remote_follow import RemoteFollow

    console = Console()
    following = RemoteFollow(find_run(run))
    try:
        state = following.look() if once or not console.is_terminal else _follow(following, console)
    except KeyboardInterrupt:
        raise typer.Exit(_INTERRUPTED) from None
    _show(state, console)
    if state.ended or state.abandoned:
        _conclude(following, console)


def _follow(following: RemoteFollow, console: Console) -> LiveState:
    from rich.live import Live

    from ddpcheck.reports.terminal.live import live_view

    with Live(console=console, screen=True, auto_refresh=False) as screen:
        for state in following:
            screen.update(live_view(state, console), refresh=True)
    return state


def _show(state: LiveState, console: Console) -> None:
    from ddpcheck.reports.terminal.console import ReportConsole
    from ddpcheck.reports.terminal.live import live_view

    ReportConsole(console).put(live_view(state, console))


def _conclude(following: RemoteFollow, console: Console) -> None:
    from ddpcheck.analysis.report_builder import build_report
    from ddpcheck.analysis.run_reader import read_description
    from ddpcheck.reports.terminal.report import render_outcome

    render_outcome(build_report(following.run, read_description(following.run.path)), console)
