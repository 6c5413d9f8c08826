"""`ddpcheck watch`: follow a run from another terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ddpcheck.cli.options import find_run

if TYPE_CHECKING:
    from rich.console import Console

    from ddpcheck.analysis.live.tracker import LiveState
    from ddpcheck.launcher.runs import RunFollower

_INTERRUPTED_STATUS = 130


def watch(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="Run folder, or the beginning of its name in ddpcheck-runs [default: latest].",
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print the current state and exit.")] = False,
) -> None:
    """Follow a run until it ends, then print its verdict.

    Reads only the run folder, so it works on any machine with access to the
    folder. Without a terminal, it prints the current state once.

    \b
    Examples:
      ddpcheck watch
      ddpcheck watch ddpcheck-runs/20260131-101500-train
      ddpcheck watch train --once
    """
    from rich.console import Console

    from ddpcheck.launcher.runs import RunFollower

    console = Console()
    follower = RunFollower(find_run(run))
    try:
        state = follower.read_state() if once or not console.is_terminal else _follow(follower, console)
    except KeyboardInterrupt:
        raise typer.Exit(_INTERRUPTED_STATUS) from None
    _show(state, console)
    if state.ended or state.abandoned:
        _show_verdict(follower, console)


def _follow(follower: RunFollower, console: Console) -> LiveState:
    from rich.live import Live

    from ddpcheck.reports.terminal.live import live_view

    with Live(console=console, screen=True, auto_refresh=False) as screen:
        for state in follower:
            screen.update(live_view(state, console), refresh=True)
    return state


def _show(state: LiveState, console: Console) -> None:
    from ddpcheck.reports.terminal.console import ReportConsole
    from ddpcheck.reports.terminal.live import live_view

    ReportConsole(console).put(live_view(state, console))


def _show_verdict(follower: RunFollower, console: Console) -> None:
    from ddpcheck.analysis.report_builder import build_report
    from ddpcheck.analysis.run_reader import read_description
    from ddpcheck.reports.terminal.report import render_outcome

    render_outcome(build_report(follower.run, read_description(follower.run.path)), console)
