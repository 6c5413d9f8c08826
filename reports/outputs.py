"""The files that a command writes in addition to the report on the terminal."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

from ddpcheck.analysis.report import Report
from ddpcheck.errors import PackageMissing, UserError
from ddpcheck.reports.safe_text import safe_line

INSTALL = "pip install 'ddpcheck[tensorboard]'"


def require_tensorboard() -> None:
    if find_spec("tensorboard") is None:
        raise PackageMissing(f"TensorBoard is not installed: install it with `{INSTALL}`")


def has_profiler_plugin() -> bool:
    return find_spec("torch_tb_profiler") is not None


def write_whole(path: Path, content: str, mode: int = 0o666) -> None:
    """Write under another name and rename: readers never see a partial file."""
    # Nodes that share a folder may have processes with the same id.
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
    """The requested outputs; empty `html` and `tensorboard` mean the run folder."""

    html: str | None = None
    junit: Path | None = None
    markdown: Path | None = None
    json: Path | None = None
    github: bool = False
    # The severity from which a finding counts as a failed test.
    fail_on: str = "error"
    # Whether a run passes although trained parameters were not compared.
    allow_incomplete: bool = False
    tensorboard: str | None = None

    @property
    def need_time_series(self) -> bool:
        """Whether an output draws all series, most of which report.json does not hold."""
        return self.tensorboard is not None

    @property
    def need_loss(self) -> bool:
        """Whether an output draws the loss."""
        return self.html is not None


def write_outputs(
    report: Report, outputs: Outputs, folder: Path, stream: TextIO, environ: Mapping[str, str] = os.environ
) -> bool:
    """Write all requested outputs; False if one failed, with the reason on stderr."""
    succeeded = True
    for path, write in _tasks(report, outputs, folder):
        try:
            write()
        except UserError as error:
            sys.stderr.write(f"ddpcheck: {safe_line(error)}\n")
            succeeded = False
        except OSError as error:
            sys.stderr.write(f"ddpcheck: {path} could not be written: {error.strerror}\n")
            succeeded = False
        except Exception as error:
            # If one report fails, the verdict and the other reports are still written.
            sys.stderr.write(f"ddpcheck: {path} could not be made ({type(error).__name__}: {error})\n")
            succeeded = False
    if outputs.github:
        from ddpcheck.reports.ci.github import add_summary, workflow_commands

        stream.write(workflow_commands(report))
        stream.flush()
        succeeded = add_summary(report, environ) and succeeded
    return succeeded


def page_of(outputs: Outputs, folder: Path) -> Path | None:
    """The path of the page."""
    if outputs.html is None:
        return None
    return Path(outputs.html) if outputs.html else folder / PAGE


def tensorboard_of(outputs: Outputs, folder: Path) -> Path | None:
    """The folder for TensorBoard."""
    if outputs.tensorboard is None:
        return None
    return Path(outputs.tensorboard) if outputs.tensorboard else folder / TENSORBOARD


def _tasks(report: Report, outputs: Outputs, folder: Path) -> Iterator[tuple[Path, Callable[[], None]]]:
    for path, make in _files(report, outputs, folder):
        yield path, partial(_write_file, path, make)
    events = tensorboard_of(outputs, folder)
    if events is not None:
        yield events, partial(_write_events, report, folder, events)


def _write_file(path: Path, make: Callable[[], str]) -> None:
    write_whole(path, make())


def _write_events(report: Report, folder: Path, out: Path) -> None:

    require_tensorboard()
    from ddpcheck.reports.tensorboard.folder import write_tensorboard

    write_tensorboard(report, folder, out)


def _files(report: Report, outputs: Outputs, folder: Path) -> Iterator[tuple[Path, Callable[[], str]]]:
    page = page_of(outputs, folder)
    if page is not None:
        from ddpcheck.reports.html.page import to_html

        yield page, lambda: to_html(report)
    if outputs.junit is not None:
        from ddpcheck.reports.ci.junit import to_junit

        yield outputs.junit, lambda: to_junit(report, outputs.fail_on, outputs.allow_incomplete)
    if outputs.markdown is not None:
        from ddpcheck.reports.ci.markdown import to_markdown

        yield outputs.markdown, lambda: to_markdown(report)
    if outputs.json is not None:
        from ddpcheck.reports.json_report import to_json

        yield outputs.json, lambda: to_json(report)
