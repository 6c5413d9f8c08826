"""Step time by phase and delays by rank, overlap of the profiled steps, and the start-up of the ranks."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ddpcheck.analysis.overlap.model import BucketOverlap, BucketPart, Overlap
from ddpcheck.analysis.report import Report
from ddpcheck.formatting import optional_size_text
from ddpcheck.reports.html.components import (
    MOST_CHART_ROWS,
    Html,
    chart,
    joined,
    pages,
    rows_table,
    table,
    tag,
    view,
)
from ddpcheck.reports.views.table import Table
from ddpcheck.reports.views.timing import (
    PHASES,
    STAGES,
    StepTimeView,
    node_reads_table,
    profiled_overlap,
    startup_summary,
    startup_table,
    step_times,
    work_phases,
)

# A delay of this share of a step, or more, has the darkest colour.
_DARKEST = 0.05
# Colour of each phase's bar.
_BARS = {
    "data": "line-5",
    "forward": "line-3",
    "backward": "line-1",
    "optimizer": "line-4",
    "other": "absent",
}
_WAIT = [phase for phase, _, _ in PHASES].index("wait")
# All ranks wait until the slowest is done, so their steps take equally long: their own work tells them apart.
_WORK = tuple((phase, label) for phase, _, label in PHASES[:_WAIT])


def step_time(report: Report) -> Html | None:
    parts = [part for times in step_times(report) for part in _group(times)]
    return joined(parts) if parts else None


def _group(times: StepTimeView) -> list[Html | None]:
    several = len(times.phases_ms) > 1
    notes = [tag("p", note) for note in times.table.notes]
    return [_phases(times), _delays(times) if several else None, *notes]


def _phases(times: StepTimeView) -> Html:
    shown = pages(list(times.phases_ms), lambda rank: times.phases_ms[rank][_WAIT], "waiting")
    kinds = [{"label": label, "colour": _BARS[phase], "share": 0.8} for phase, label in _WORK]
    spec = {
        "unit": "ms",
        "kinds": kinds,
        "windows": [
            {"rows": [f"rank {rank}" for rank in ranks], "spans": _phase_spans(times, ranks)}
            for _, ranks in shown
        ],
    }
    choices = [title for title, _ in shown] if len(shown) > 1 else []
    key = [(_BARS[phase], label) for phase, label in _WORK]
    caption = f"Own work per rank by phase{times.suffix} ({times.table.subtitle})"
    figures = rows_table(times.table, times.table.rows)
    return chart("lanes", caption, times.summary, spec, figures, key, choices)


def _phase_spans(times: StepTimeView, ranks: Sequence[int]) -> list[list[object]]:
    spans: list[list[object]] = []
    for number, rank in enumerate(ranks):
        start = 0.0
        for kind, took in enumerate(times.phases_ms[rank][: len(_WORK)]):
            if took:
                spans.append([number, round(start, 4), round(start + took, 4), kind])
            start += took
    return spans


def _delays(times: StepTimeView) -> Html:
    delays, phases = times.delays_ms, work_phases()
    darkest = max(_DARKEST * times.median_step_ms, *map(max, delays.values()))
    shown = pages(list(delays), lambda rank: sum(delays[rank]), "delay", only_most=True)
    spec = {
        "columns": list(phases),
        "xLabel": "phase",
        "unit": "ms more than the median rank",
        "low": 0,
        "high": darkest,
        "windows": [
            {"rows": [f"rank {rank}" for rank in ranks], "values": [list(delays[rank]) for rank in ranks]}
            for _, ranks in shown
        ],
    }
    rows = [[f"rank {rank}", *(f"{value:+.4g}" for value in values)] for rank, values in delays.items()]
    label = "Delay against the median rank, ms, median over steps"
    figures = table(("rank", *phases), rows, label, numbers=range(1, 1 + len(phases)))
    key = [("heat-1", "median or less"), ("heat-4", "more"), ("heat-6", f"{darkest:.3g} ms more")]
    choices = [title for title, _ in shown] if len(shown) > 1 else []
    caption = f"Delay against the median rank by phase{times.suffix} (ms, median over steps)"
    return chart("grid", caption, times.delay_summary, spec, figures, key, choices)


_MOST_STEPS = 16
_MOST_BUCKETS = 200
_COMPUTE, _QUEUED, _WAITING, _TRANSFER = range(4)
# Communication is drawn over compute: what is not over compute is exposed.
_KINDS = (
    {"label": "compute", "colour": "compute", "share": 0.92},
    {"label": "bucket ready, not yet started", "colour": "absent", "share": 0.12},
    {"label": "waiting for the last rank", "colour": "waiting", "share": 0.3},
    {"label": "transfer", "colour": "ink", "share": 0.5},
)


def overlap(report: Report) -> Html | None:
    profiled = profiled_overlap(report)
    if profiled is None or report.overlap is None or not report.overlap.ranks:
        return None
    timeline = _timeline(report.overlap, profiled.buckets) if report.overlap.buckets else None
    command = f"ddpcheck view {shlex.quote(str(report.run.get('path') or 'RUN'))} --perfetto"
    in_perfetto = tag(
        "p", "All operators on one timeline, in Perfetto: ", tag("code", command), class_="quiet"
    )
    return joined([view(profiled.ranks, heading=True), timeline, in_perfetto])


def _timeline(overlap: Overlap, buckets: Table) -> Html:
    by_rank = {rank.rank: rank for rank in overlap.ranks}
    # Of many ranks those that arrive last most often and least often.
    _, ranks = pages(list(by_rank), lambda rank: by_rank[rank].last_arrivals or 0, "late arrivals")[0]
    computing = {rank: by_rank[rank].computing for rank in ranks}
    steps = sorted({bucket.step for bucket in overlap.buckets})[:_MOST_STEPS]
    by_step = [[bucket for bucket in overlap.buckets if bucket.step == step] for step in steps]
    spec = {
        "unit": "ms",
        "kinds": list(_KINDS),
        "rows": [f"rank {rank}" for rank in ranks],
        "windows": [{"spans": _overlap_spans(some, computing)} for some in by_step],
    }
    has_compute = any(computing.values())
    summary = f"{len(overlap.buckets)} reductions in {len(steps)} steps, from ready gradients to the end"
    summary += ", drawn over compute." if has_compute else "."
    if len(overlap.ranks) > MOST_CHART_ROWS:
        summary += f" {MOST_CHART_ROWS} ranks are drawn: those that arrive last most often, and least often."
    kinds = _KINDS if has_compute else _KINDS[1:]
    key = [(str(kind["colour"]), str(kind["label"])) for kind in kinds]
    choices = [f"step {step}" for step in steps] if len(steps) > 1 else []
    figures = rows_table(buckets, buckets.rows[:_MOST_BUCKETS])
    return chart("lanes", "DDP buckets on one timeline (ms)", summary, spec, figures, key, choices)


def _overlap_spans(
    buckets: Sequence[BucketOverlap], computing: Mapping[int, Sequence[tuple[int, int]]]
) -> list[list[object]]:
    rows = {rank: number for number, rank in enumerate(computing)}
    parts = [(bucket, part) for bucket in buckets for part in bucket.ranks if part.rank in rows]
    first = min(
        (min(part.start_ns, part.start_ns if part.ready_ns is None else part.ready_ns) for _, part in parts),
        default=0,
    )
    last = max((part.end_ns for _, part in parts), default=0)
    # Compute shortly before and after the reductions is drawn too.
    margin = (last - first) // 4 if any(computing.values()) else 0
    began, ended = first - margin, last + margin
    spans: list[list[object]] = [
        [rows[rank], (max(start, began) - began) / 1e6, (min(end, ended) - began) / 1e6, _COMPUTE]
        for rank, pieces in computing.items()
        for start, end in pieces
        if start < ended and end > began
    ]
    return spans + [span for bucket, part in parts for span in _reduction(bucket, part, rows, began)]


def _reduction(
    bucket: BucketOverlap, part: BucketPart, rows: Mapping[int, int], began: int
) -> list[list[object]]:
    """One rank's part in the reduction of a bucket, from its last gradient to its end."""
    start, end = part.start_ns, part.end_ns
    hidden = 100 * part.hidden_ns / max(1, end - start)
    label = f"bucket {bucket.bucket}, {optional_size_text(bucket.bytes)}, {hidden:.0f} % hidden"
    ready = start if part.ready_ns is None else min(start, part.ready_ns)
    arrived = min(end, start + (part.wait_ns or 0))
    phases = ((_QUEUED, ready, start), (_WAITING, start, arrived), (_TRANSFER, arrived, end))
    return [
        [rows[part.rank], (first - began) / 1e6, (last - began) / 1e6, kind, label]
        for kind, first, last in phases
        if last > first
    ]


_COLOURS = ("absent", "line-6", "line-2", "line-5", "line-4", "line-8", "line-1", "line-7", "line-3")


def startup(report: Report) -> Html | None:
    startup, table = report.startup, startup_table(report)
    if startup is None or table is None:
        return None
    rows = {row["rank"]: row for row in startup["ranks"]}
    starts = [row["began"] for row in rows.values()]
    began = min((start for start in starts if start is not None), default=0.0)
    shown = pages(list(rows), lambda rank: float(rows[rank]["total"] or 0.0), "time")
    labels = [title for _, _, title in STAGES]
    spec = {
        "unit": "s",
        "kinds": [
            {"label": label, "colour": colour, "share": 0.8}
            for label, colour in zip(labels, _COLOURS, strict=True)
        ],
        "windows": [
            {
                "rows": [f"rank {rank}" for rank in ranks],
                "spans": _startup_spans([rows[rank] for rank in ranks], began),
            }
            for _, ranks in shown
        ],
    }
    figures = [rows_table(table, table.rows)]
    nodes = node_reads_table(report)
    figures += [] if nodes is None else [rows_table(nodes, nodes.rows)]
    choices = [title for title, _ in shown] if len(shown) > 1 else []
    key = list(zip(_COLOURS, labels, strict=True))
    caption = "From the start of Python to the end of the first step (s)"
    return chart("lanes", caption, startup_summary(startup), spec, joined(figures), key, choices)


def _startup_spans(rows: Sequence[Mapping[str, Any]], began: float) -> list[list[object]]:
    """Stages one after the other, as they mostly happen; a script may read weights several times."""
    spans: list[list[object]] = []
    for number, row in enumerate(rows):
        start = (row["began"] - began) if row.get("began") is not None else 0.0
        for kind, (stage, _, _) in enumerate(STAGES):
            took = row.get(stage) or 0.0
            if took:
                spans.append([number, round(start, 4), round(start + took, 4), kind, _remark(row, stage)])
            start += took
    return spans


def _remark(row: Mapping[str, Any], stage: str) -> str:
    if stage != "wrap" or row.get("waited") is None:
        return ""
    return f"{row['waited']:.3g} s of it waiting for the last rank"
