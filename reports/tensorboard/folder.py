"""A finished analysis as a folder for TensorBoard: `job`, `rank-0000`, `rank-0001`, …"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import time
from dataclasses import replace
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from ddpcheck.analysis.finding import Finding
from ddpcheck.analysis.overlap.model import Overlap
from ddpcheck.analysis.report import Report
from ddpcheck.analysis.timeseries.model import Histogram, LinkMatrix, RunTimeSeries
from ddpcheck.errors import UsageError
from ddpcheck.links.model import megabits
from ddpcheck.reports.ci.markdown import markdown_table, report_tables
from ddpcheck.reports.finding_text import evidence_text, finding_location
from ddpcheck.reports.safe_text import safe_line, shortened
from ddpcheck.reports.tensorboard.event_file import EventFile, write_lines
from ddpcheck.reports.tensorboard.tags import layout_of, safe_name
from ddpcheck.reports.verdict import counted, in_order, verdict_sentence
from ddpcheck.reports.views.timing import profiled_overlap
from ddpcheck.run_mark import mark_of

_MOST_FINDINGS = 20
_MOST_ROWS = 64
# TensorBoard's Markdown passes HTML and images through and has few escapes; character references are safe.
_ACTIVE = re.compile(r"[^\w\s.,;()/%=-]|(?<=:)//|^[-+=\d]|_")
WHY_IT_DIFFERS = """\
The tab *PYTORCH_PROFILER* shows overlap too, and its figures may differ. It counts a kernel as communication only \
if an identifier links it to an operator such as nccl:all_reduce. Current traces have no such link, so it counts \
NCCL kernels as compute and communication seems hidden behind itself. With gloo it counts every other CPU operator \
on any thread as compute, including those of ddpcheck. ddpcheck identifies NCCL kernels by name and gloo \
collectives by their spans, excludes its own work, and intersects exact unions of intervals. Where the two differ, \
use these figures."""


def plain_text(value: object) -> str:
    """Text in which nothing is markup, in a line or in a cell of a table."""
    return _ACTIVE.sub(lambda match: "".join(f"&#{ord(c)};" for c in match[0]), safe_line(value))


def verdict_text(report: Report) -> str:
    """A short version of the report."""
    ordered = in_order(report)
    blocks = [f"## {plain_text(verdict_sentence(report))}", _about(report)]
    blocks += [_finding(finding) for finding in ordered[:_MOST_FINDINGS]]
    more = len(ordered) - _MOST_FINDINGS
    blocks += [f"and {counted(more, 'more finding')}, in report.json"] if more > 0 else []
    blocks += report_tables(report, plain_text)
    return "\n\n".join(block for block in blocks if block)


def rank_text(report: Report, rank: int) -> str:
    """The findings about a rank; empty if there is none."""
    mine = [finding for finding in in_order(report) if rank in finding.ranks]
    return "\n\n".join(_finding(finding) for finding in mine[:_MOST_FINDINGS])


def overlap_text(report: Report) -> str:
    """Overlap by rank, and why the profiler's own tab shows other figures; empty if no step was profiled."""
    profiled = profiled_overlap(report)
    if profiled is None:
        return ""
    table = replace(profiled.ranks, rows=profiled.ranks.rows[:_MOST_ROWS])
    heading = f"## {plain_text(', '.join(filter(None, (table.title, table.subtitle))))}"
    missing = "\n".join(f"- {plain_text(note)}" for note in table.notes)
    content = markdown_table(table, plain_text) if table.rows else "There is no usable trace."
    return "\n\n".join(filter(None, (heading, content, missing, WHY_IT_DIFFERS)))


def _about(report: Report) -> str:
    size = f"{counted(report.world_size, 'rank')}, {counted(report.steps, 'step')}"
    return f"{_code(shlex.join(report.command))}\n\n{size}" if report.command else size


def _finding(finding: Finding) -> str:
    location = finding_location(finding)
    blocks = [
        f"### {finding.severity.value} {finding.code}: {plain_text(finding.title)}",
        f"*{plain_text(location)}*" if location else "",
        plain_text(finding.message) if finding.message != finding.title else "",
        _code(evidence_text(finding.evidence)) if finding.evidence else "",
        f"**why** {plain_text(finding.cause)}" if finding.cause else "",
        f"**fix** {plain_text(finding.fix)}" if finding.fix else "",
    ]
    return "\n\n".join(block for block in blocks if block)


def _code(text: str) -> str:
    """An indented code block: no text in it can end it."""
    return "\n".join(f"    {safe_line(line)}" for line in text.splitlines())


# Up to this many nodes cells have numbers; beyond that only colours and names.
_MOST_FIGURES = 12
_MOST_NAMES = 128
_WIDE, _HIGH, _SMALL = 76, 32, 12
_MARGIN, _TITLE, _NAME = 10, 62, 84
_BACKGROUND, _TEXT, _UNKNOWN = (255, 255, 255), (30, 34, 40), (232, 234, 238)
_FAST, _SLOW = (222, 238, 226), (178, 24, 43)
# Links that are this many times slower have the darkest colour.
_SLOWEST = 5.0
Colour = tuple[int, int, int]


def link_image(matrix: LinkMatrix) -> tuple[bytes, int, int]:
    """The image as PNG, its width and its height."""
    names = matrix.names[:_MOST_NAMES]
    figures = len(names) <= _MOST_FIGURES
    wide, high = (_WIDE, _HIGH) if figures else (_SMALL, _SMALL)
    width = max(_MARGIN * 2 + _NAME + wide * len(names), 380)
    height = _MARGIN * 2 + _TITLE + high * (len(names) + (1 if figures else 0))
    image = Image.new("RGB", (width, height), _BACKGROUND)
    draw = ImageDraw.Draw(image)
    title, small = ImageFont.load_default(15), ImageFont.load_default(12 if figures else 10)
    draw.text((_MARGIN, _MARGIN), matrix.title, _TEXT, title)
    legend = f"from row to column, darker is slower;\nusual throughput {megabits(matrix.usual)}"
    draw.multiline_text((_MARGIN, _MARGIN + 21), legend, _TEXT, small)
    top = _MARGIN + _TITLE
    for row, name in enumerate(names):
        y = top + high * (row + (1 if figures else 0))
        draw.text((_MARGIN, y + high / 2), _short(name, 11), _TEXT, small, anchor="lm")
        for column, other in enumerate(names):
            x = _MARGIN + _NAME + wide * column
            if figures and row == 0:
                draw.text((x + wide / 2, top + high / 2), _short(other, 10), _TEXT, small, anchor="mm")
            rate = matrix.rates[row][column]
            colour = _colour(rate, matrix.usual)
            draw.rectangle((x + 1, y + 1, x + wide - 1, y + high - 1), fill=colour)
            if figures and rate is not None:
                draw.text(
                    (x + wide / 2, y + high / 2), megabits(rate), _text_colour(colour), small, anchor="mm"
                )
    content = io.BytesIO()
    image.save(content, "PNG")
    return content.getvalue(), width, height


def _colour(rate: float | None, usual: float) -> Colour:
    if rate is None:
        return _UNKNOWN
    slower = usual / rate if rate > 0 else _SLOWEST
    share = min(1.0, max(0.0, (slower - 1) / (_SLOWEST - 1)))
    red, green, blue = (round(a + share * (b - a)) for a, b in zip(_FAST, _SLOW, strict=True))
    return red, green, blue


def _text_colour(colour: Colour) -> Colour:
    light = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2]
    return _TEXT if light > 140 else _BACKGROUND


def _short(name: str, most: int) -> str:
    text = safe_line(name)
    return text if len(text) <= most else shortened(text, most)[: most - 1] + "…"


MARK = "ddpcheck.json"


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
