"""`ddpcheck merge`: the run folders of several nodes, joined and reported on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ddpcheck.errors import UsageError


def merge(
    folders: Annotated[
        list[str] | None, typer.Argument(metavar="DIR...", help="Run folders of one job, one of each node.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="New folder for the whole [default: in ddpcheck-runs].", metavar="DIR")
    ] = None,
) -> None:
    """Join the run folders of several nodes and report on the whole job.

    For nodes that share no storage: copy their run folders to one place first.
    The folders stay as they are.

    \b
    Example:
      ddpcheck merge node0/ddpcheck-runs/* node1/ddpcheck-runs/* --out whole
    """
    if not folders:
        raise UsageError("there is nothing to join: name the run folders of all nodes")
    from rich.console import Console

    from ddpcheck.analysis.report_builder import analyse_run
    from ddpcheck.launcher.multi_node.merge import merge as join
    from ddpcheck.launcher.run_folder import write_report
    from ddpcheck.reports.terminal.report import render

    whole = join([Path(folder) for folder in folders], out)
    report = analyse_run(whole)
    write_report(report, whole)
    render(report, Console())
