"""`ddpcheck report`: the report of a stored run, on the terminal or in a file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddpcheck.cli.options import OUTPUT_OPTIONS, find_run, requested_outputs, with_options
from ddpcheck.config import Config
from ddpcheck.errors import UsageError
from ddpcheck.reports.outputs import page_of, write_outputs

if TYPE_CHECKING:
    from ddpcheck.analysis.report import Report

TIMELINE = "timeline.json.gz"


@with_options(*OUTPUT_OPTIONS, "verbose", "quiet")
def report(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="Run folder, or the beginning of its name in ddpcheck-runs [default: latest].",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Argument(metavar="[OUT]", help="Output file of --trace, or output folder of --tensorboard."),
    ] = None,
    gradients: Annotated[
        int | None,
        typer.Option(metavar="STEP", min=0, help="Compare the gradients that were saved at this step."),
    ] = None,
    trace: Annotated[
        bool,
        typer.Option(
            "--trace",
            help=f"Write one Perfetto timeline of all profiled ranks to OUT, or to {TIMELINE} in the run folder.",
        ),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print report.json instead.")] = False,
    **settings: Any,
) -> None:
    """Show the report of a stored run.

    \b
    Examples:
      ddpcheck report
      ddpcheck report -v                (with all tables)
      ddpcheck report ddpcheck-runs/20260131-101500-train --json
      ddpcheck report --html            (report.html in the run folder)
      ddpcheck report --gradients 10    (after run --save-gradients 10)
      ddpcheck report --trace all-ranks.json.gz    (after run --profile)
      ddpcheck report RUN --tensorboard events     (default: tensorboard in the run folder)
    """
    if trace and out is None and run is not None and _is_timeline_name(run):
        out, run = Path(run), None
    if out is not None and trace == settings["tensorboard"]:
        missing = "only one of --trace and --tensorboard" if trace else "--trace or --tensorboard"
        raise UsageError(f"{out}: OUT is the output of --trace or --tensorboard; give {missing}")
    path = find_run(run)
    if trace:
        _write_timeline(path, out or path / TIMELINE)
        return
    config = Config.from_options(settings)
    outputs = requested_outputs(config, out)
    if gradients is not None:
        _show_gradients(path, gradients)
        return
    from ddpcheck.analysis.report_builder import analyse_run
    from ddpcheck.launcher.runs import launcher_has_ended
    from ddpcheck.launcher.stored_report import read_report
    from ddpcheck.records.reader import read_run_file
    from ddpcheck.reports.terminal.progress import ReadingProgress

    abandoned = launcher_has_ended(read_run_file(path))
    # That of the launcher, which has followed the job. It contains no time series.
    stored = None if outputs.need_time_series or outputs.need_loss else read_report(path)
    with ReadingProgress(sys.stderr) as progress:
        result = stored or analyse_run(
            path,
            course=outputs.need_time_series,
            loss=outputs.need_loss,
            abandoned=abandoned,
            progress=progress,
        )
    if json:
        from ddpcheck.reports.json_report import to_json

        typer.echo(to_json(result), nl=False)
    else:
        _show(result, page_of(outputs, path), config)
    if not write_outputs(result, outputs, path, sys.stderr if json else sys.stdout):
        raise typer.Exit(1)
    if config.tensorboard:
        command = f"ddpcheck view {path}" if out is None else f"tensorboard --logdir {out}"
        typer.echo(f"Next: `{command}` shows it in TensorBoard.", err=json)


def _show(result: Report, page: Path | None, config: Config) -> None:
    from rich.console import Console

    from ddpcheck.reports.terminal.report import Detail, render

    render(result, Console(), page, Detail.requested(verbose=config.verbose, quiet=config.quiet))


def _show_gradients(path: Path, step: int) -> None:
    from rich.console import Console

    from ddpcheck.analysis.allreduce.saved_gradients import saved_gradients
    from ddpcheck.reports.terminal.evidence import render_gradients

    render_gradients(saved_gradients(path, step), Console())


def _is_timeline_name(text: str) -> bool:
    return text.endswith((".json", ".json.gz")) and not Path(text).is_dir()


def _write_timeline(path: Path, out: Path) -> None:
    if not _is_timeline_name(str(out)):
        raise UsageError(f"--trace {out}: the name must end in .json or .json.gz")
    from ddpcheck.analysis.overlap.timeline import write_timeline

    ranks, left_out = write_timeline(path, out)
    for reason in left_out:
        typer.echo(f"left out: {reason}", err=True)
    typer.echo(
        f"Wrote one timeline of {ranks} ranks to {out}. Next: `ddpcheck view RUN --perfetto` opens it in Perfetto."
    )
