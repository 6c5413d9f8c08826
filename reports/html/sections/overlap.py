"""The profiled steps: overlap by rank, and each bucket's reduction on a timeline of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddpcheck.analysis.overlap.model import BucketOverlap, BucketPart, Overlap
from ddpcheck.analysis.report import Report
from ddpcheck.formatting import optional_size_text
from ddpcheck.reports.html.components import MOST_CHART_ROWS, Html, chart, joined, pages, rows_table, view
from ddpcheck.reports.views.overlap import profiled_overlap
from ddpcheck.reports.views.table import Table

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


def section(report: Report) -> Html | None:
    profiled = profiled_overlap(report)
    if profiled is None or report.overlap is None or not report.overlap.ranks:
        return None
    timeline = _timeline(report.overlap, profiled.buckets) if report.overlap.buckets else None
    return joined([view(profiled.ranks, heading=True), timeline])


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
        "windows": [{"spans": _spans(some, computing)} for some in by_step],
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


def _spans(
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
