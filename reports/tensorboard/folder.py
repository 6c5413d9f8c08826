"""A finished analysis as a folder for TensorBoard: `job`, `rank-0000`, `rank-0001`, …"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

from ddpcheck.analysis.overlap.model import Overlap
from ddpcheck.analysis.report import Report
from ddpcheck.analysis.timeseries.model import Histogram, RunTimeSeries
from ddpcheck.errors import UsageError
from ddpcheck.reports.tensorboard.event_file import EventFile, write_lines
from ddpcheck.reports.tensorboard.layout import layout_of
from ddpcheck.reports.tensorboard.link_image import link_image
from ddpcheck.reports.tensorboard.tags import safe_name
from ddpcheck.reports.tensorboard.texts import overlap_text, rank_text, verdict_text
from ddpcheck.version import VERSION

MARK = "ddpcheck.json"
_SOURCES = ("run.json", "rank-*.jsonl", "node-*.jsonl", "links.json", "gradients/*.safetensors", "traces/*")


def mark_of(run: Path) -> dict[str, Any]:
    """The number of files, their total size and the latest time of modification."""
    stats = [path.stat() for pattern in _SOURCES for path in run.glob(pattern)]
    return {
        "ddpcheck": VERSION,
        "files": len(stats),
        "bytes": sum(each.st_size for each in stats),
        "latest": max((each.st_mtime_ns for each in stats), default=0),
    }


def is_current(run: Path, folder: Path) -> bool:
    try:
        written = json.loads((folder / MARK).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(written == mark_of(run))


# Names that the profiler plugin recognises as traces: worker, number and extension.
_WORKER = re.compile(r".+\.\d+\.pt\.trace\.json(\.gz)?")


def link_traces(overlap: Overlap | None, run: Path, into: Path, final: Path) -> int:
    """Link the traces of the profiled attempt in `into`, which is moved to `final` later; return their number."""
    count = 0
    for rank in overlap.ranks if overlap else ():
        source = (run / rank.file).absolute()
        if source.is_file():
            into.mkdir(parents=True, exist_ok=True)
            _link(source, into, final, _name(source, rank.rank))
            count += 1
    return count


def _name(source: Path, rank: int) -> str:
    if _WORKER.fullmatch(source.name) and f"rank{rank}." in source.name:
        return source.name
    ending = "json.gz" if source.name.endswith(".gz") else "json"
    return f"rank{rank}.{source.stat().st_mtime_ns}.pt.trace.{ending}"


def _link(source: Path, into: Path, final: Path, name: str) -> None:
    """A relative link, so that a run folder can be moved; a copy where links are not supported."""
    try:
        (into / name).symlink_to(os.path.relpath(source, final.absolute()))
    except OSError:
        shutil.copyfile(source, into / name)


JOB = "job"


def write_tensorboard(report: Report, run: Path, out: Path) -> None:
    """Write under another name and rename; replaces the folder of an earlier report."""
    if out.exists() and not _is_ours(out):
        raise UsageError(f"{out} exists and was not created by ddpcheck: name a folder that does not exist")
    mark = mark_of(run)
    temporary = out.with_name(f".{out.name}.{os.uname().nodename}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        _write(report, report.course or RunTimeSeries(), temporary)
        link_traces(report.overlap, run, temporary / JOB, out / JOB)
        (temporary / MARK).write_text(json.dumps(mark), encoding="utf-8")
        if out.exists():
            shutil.rmtree(out)
        temporary.replace(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _is_ours(out: Path) -> bool:
    return out.is_dir() and ((out / MARK).is_file() or not any(out.iterdir()))


def _write(report: Report, course: RunTimeSeries, folder: Path) -> None:
    began = course.when(0) or time.time()
    histograms: dict[int | None, list[Histogram]] = {}
    for each in course.histograms:
        histograms.setdefault(each.rank, []).append(each)
    with EventFile(folder / JOB, began) as file:
        _write_job(file, report, course)
        write_lines(file, course.job, course.when)
        _write_histograms(file, histograms.get(None, []), course)
    for rank, lines in course.ranks.items():
        with EventFile(folder / f"rank-{rank:04d}", began) as file:
            findings = rank_text(report, rank)
            if findings:
                file.text("report/findings_about_this_rank", findings)
            write_lines(file, lines, course.when)
            _write_histograms(file, histograms.get(rank, []), course)
    for name, lines in course.spread.items():
        with EventFile(folder / f"all-ranks-{name}", began) as file:
            write_lines(file, lines, course.when)


def _write_job(file: EventFile, report: Report, course: RunTimeSeries) -> None:
    all_series = (course.job, *course.ranks.values(), *course.spread.values())
    file.layout(layout_of({line.figure for lines in all_series for line in lines}))
    file.text("report/verdict", verdict_text(report))
    overlap = overlap_text(report)
    if overlap:
        file.text("report/overlap", overlap)
    for number, matrix in enumerate(course.links):
        file.image(f"links/{number}", *link_image(matrix), matrix.title)


def _write_histograms(file: EventFile, histograms: list[Histogram], course: RunTimeSeries) -> None:
    for each in histograms:
        name = "/".join(filter(None, ["gradients", safe_name(each.of), safe_name(each.parameter)]))
        when = "after_allreduce" if each.reduced else "before_allreduce"
        file.histogram(f"{name}/{when}", each.step, course.when(each.step), each.edges, each.counts)
