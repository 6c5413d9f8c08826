"""`ddpcheck report`: a stored run again, for people or for programs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddpcheck.cli.report_options import (
    Github,
    Html,
    Junit,
    Markdown,
    Tensorboard,
    checked_output,
    checked_page,
    shown_by,
)
from ddpcheck.cli.run_lookup import find_run
from ddpcheck.errors import UsageError
from ddpcheck.reports.outputs import Outputs, page_of, write_outputs

if TYPE_CHECKING:
    from ddpcheck.analysis.report import Report

TIMELINE = "timeline.json.gz"


def report(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]", help="Run folder, or (part of) its name in ddpcheck-runs [default: latest]."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Argument(metavar="[OUT]", help="File for --trace, or folder for --tensorboard.")
    ] = None,
    gradients: Annotated[
        int | None,
        typer.Option(metavar="STEP", min=0, help="Compare the gradients that were saved at this step."),
    ] = None,
    trace: Annotated[
        bool,
        typer.Option(
            "--trace",
            help=f"Write one timeline of all profiled ranks, for Perfetto, to OUT or {TIMELINE} in the run folder.",
        ),
    ] = False,
    html: Html = None,
    junit: Junit = None,
    markdown: Markdown = None,
    github: Github = False,
    tensorboard: Tensorboard = False,
    json: Annotated[bool, typer.Option("--json", help="Print report.json instead.")] = False,
) -> None:
    """Show the report of a run again.

    \b
    Examples:
      ddpcheck report
      ddpcheck report ddpcheck-runs/20260131-101500-train --json
      ddpcheck report --html            (report.html in the run folder)
      ddpcheck report --gradients 10    (after run --save-gradients 10)
      ddpcheck report --trace all-ranks.json.gz    (after run --profile)
      ddpcheck report RUN --tensorboard events     (without a folder: tensorboard in the run folder)
    """
    if trace and out is None and run is not None and _names_a_timeline(run):
        out, run = Path(run), None
    if out is not None and trace == tensorboard:
        which = "one of --trace and --tensorboard" if trace else "--trace or --tensorboard"
        raise UsageError(f"{out}: a second name is where --trace or --tensorboard writes to; give {which}")
    path = find_run(run)
    if trace:
        _write_timeline(path, out or path / TIMELINE)
        return
    asked = Outputs(
        html=checked_page(html),
        junit=checked_output("--junit", junit),
        markdown=checked_output("--markdown", markdown),
        github=github,
        tensorboard=str(out or "") if tensorboard else None,
    )
    if tensorboard:
        from ddpcheck.reports.tensorboard.presence import require_tensorboard

        require_tensorboard()
    if gradients is not None:
        _show_gradients(path, gradients)
        return
    from ddpcheck.analysis.report_builder import analyse_run

    result = analyse_run(path, course=tensorboard)
    if json:
        from ddpcheck.reports.json_report import to_json

        typer.echo(to_json(result), nl=False)
    else:
        _show(result, page_of(asked, path))
    if not write_outputs(result, asked, path, sys.stderr if json else sys.stdout):
        raise typer.Exit(1)
    if tensorboard:
        typer.echo(shown_by(path, out), err=json)


def _show(result: Report, page: Path | None) -> None:
    from rich.console import Console

    from ddpcheck.reports.terminal.report import render

    render(result, Console(), page)


def _show_gradients(path: Path, step: int) -> None:
    from rich.console import Console

    from ddpcheck.analysis.allreduce.saved_gradients import saved_gradients
    from ddpcheck.reports.terminal.saved_gradients import render_gradients

    render_gradients(saved_gradients(path, step), Console())


def _names_a_timeline(text: str) -> bool:
    return text.endswith((".json", ".json.gz")) and not Path(text).is_dir()


def _write_timeline(path: Path, out: Path) -> None:
    if not _names_a_timeline(str(out)):
        raise UsageError(f"--trace {out}: the name must end in .json or .json.gz")
    from ddpcheck.analysis.overlap.build import traces_of_run
    from ddpcheck.traces.analyse import analyse
    from ddpcheck.traces.merged import write_merged

    traces, left_out = traces_of_run(path)
    write_merged(traces, analyse(traces), out)
    for said in left_out:
        typer.echo(f"left out: {said}", err=True)
    typer.echo(f"One timeline of {len(traces)} ranks is in {out}; open it in Perfetto or chrome://tracing.")
