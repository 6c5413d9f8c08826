"""`ddpcheck merge`: merge the run folders of several nodes and report on the job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ddpcheck.errors import UsageError


def merge(
    folders: Annotated[
        list[str] | None, typer.Argument(metavar="DIR...", help="Run folders of one job, one per node.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the merged run [default: in ddpcheck-runs].", metavar="DIR")
    ] = None,
) -> None:
    """Merge the run folders of several nodes and report on the whole job.

    For nodes without shared storage: copy their run folders to one machine
    first. The folders stay unchanged.

    \b
    Example:
      ddpcheck merge node0/ddpcheck-runs/* node1/ddpcheck-runs/* --out merged
    """
    if not folders:
        raise UsageError("no run folders given; give the run folders of all nodes")
    from rich.console import Console

    from ddpcheck.analysis.report_builder import analyse_run
    from ddpcheck.launcher.multi_node.merge import merge_runs
    from ddpcheck.launcher.stored_report import write_report
    from ddpcheck.reports.terminal.report import render

    merged = merge_runs([Path(folder) for folder in folders], out)
    report = analyse_run(merged)
    write_report(report, merged)
    render(report, Console())
