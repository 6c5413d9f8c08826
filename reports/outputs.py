"""The reports that a command was asked to leave beside the one on the terminal."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TextIO

from ddpcheck.analysis.report import Report
from ddpcheck.errors import UserError
from ddpcheck.reports.safe_text import safe_line


def write_whole(path: Path, content: str, mode: int = 0o666) -> None:
    """Under another name first: half a report would be worse for its readers than none."""
    # Nodes that share a folder may have processes of the same number.
    temporary = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(content)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


PAGE = "report.html"
TENSORBOARD = "tensorboard"


@dataclass(frozen=True)
class Outputs:
    """What was asked for; `html` and `tensorboard` are empty where they go into the run folder."""

    html: str | None = None
    junit: Path | None = None
    markdown: Path | None = None
    json: Path | None = None
    github: bool = False
    # From which severity on a finding counts as a failed test.
    fail_on: str = "error"
    tensorboard: str | None = None


def write_outputs(
    report: Report, asked: Outputs, folder: Path, stream: TextIO, environ: Mapping[str, str] = os.environ
) -> bool:
    """Write everything that was asked for; False where a file could not be written, which is said on stderr."""
    well = True
    for path, write in _tasks(report, asked, folder):
        try:
            write()
        except UserError as error:
            sys.stderr.write(f"ddpcheck: {safe_line(error)}\n")
            well = False
        except OSError as error:
            sys.stderr.write(f"ddpcheck: {path} could not be written: {error.strerror}\n")
            well = False
        except Exception as error:
            # The job is over and judged: a report that fails must cost neither its verdict nor the others.
            sys.stderr.write(f"ddpcheck: {path} could not be made ({type(error).__name__}: {error})\n")
            well = False
    if asked.github:
        from ddpcheck.reports.ci.github import add_summary, workflow_commands

        stream.write(workflow_commands(report))
        stream.flush()
        well = add_summary(report, environ) and well
    return well


def page_of(asked: Outputs, folder: Path) -> Path | None:
    """Where the page goes."""
    if asked.html is None:
        return None
    return Path(asked.html) if asked.html else folder / PAGE


def tensorboard_of(asked: Outputs, folder: Path) -> Path | None:
    """Where the folder for TensorBoard goes."""
    if asked.tensorboard is None:
        return None
    return Path(asked.tensorboard) if asked.tensorboard else folder / TENSORBOARD


def _tasks(report: Report, asked: Outputs, folder: Path) -> Iterator[tuple[Path, Callable[[], None]]]:
    for path, make in _files(report, asked, folder):
        yield path, partial(_write_file, path, make)
    events = tensorboard_of(asked, folder)
    if events is not None:
        yield events, partial(_write_events, report, folder, events)


def _write_file(path: Path, make: Callable[[], str]) -> None:
    write_whole(path, make())


def _write_events(report: Report, folder: Path, out: Path) -> None:
    from ddpcheck.reports.tensorboard.presence import require_tensorboard

    require_tensorboard()
    from ddpcheck.reports.tensorboard.folder import write_tensorboard

    write_tensorboard(report, folder, out)


def _files(report: Report, asked: Outputs, folder: Path) -> Iterator[tuple[Path, Callable[[], str]]]:
    page = page_of(asked, folder)
    if page is not None:
        from ddpcheck.reports.html.page import to_html

        yield page, lambda: to_html(report)
    if asked.junit is not None:
        from ddpcheck.reports.ci.junit import to_junit

        yield asked.junit, lambda: to_junit(report, asked.fail_on)
    if asked.markdown is not None:
        from ddpcheck.reports.ci.markdown import to_markdown

        yield asked.markdown, lambda: to_markdown(report)
    if asked.json is not None:
        from ddpcheck.reports.json_report import to_json

        yield asked.json, lambda: to_json(report)
