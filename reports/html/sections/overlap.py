"""The profiled steps: each bucket's reduction on a timeline of all ranks, and how much of it was hidden."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddpcheck.formatting import optional_size_text, percent_text, rate_text, time_text
from ddpcheck.reports.html.chart import chart
from ddpcheck.reports.html.context import PageContext
from ddpcheck.reports.html.markup import Html, joined, table, tag
from ddpcheck.reports.html.table import MOST_ROWS, folded_table, pages

_MOST_STEPS = 16
_MOST_BUCKETS = 200
_COMPUTE, _QUEUED, _WAITING, _TRANSFER = range(4)
# Communication lies on top of compute: what sticks out to the right of it was not hidden.
_KINDS = (
    {"label": "computing", "colour": "compute", "share": 0.92},
    {"label": "bucket ready, not yet started", "colour": "absent", "share": 0.12},
    {"label": "waiting for the last rank", "colour": "waiting", "share": 0.3},
    {"label": "transfer", "colour": "ink", "share": 0.5},
)


def section(made: PageContext) -> Html | None:
    overlap = made.document.get("overlap")
    if not overlap or not overlap.get("ranks"):
        return None
    drawn = [_shares(overlap), _timeline(overlap) if overlap["buckets"] else None]
    drawn += [tag("p", said, class_="quiet") for said in overlap.get("left_out") or ()]
    return joined(drawn)


def _shares(overlap: Mapping[str, Any]) -> Html:
    headers = ("", "steps", "compute", "communication", "hidden", "", "exposed", "waited", "idle")
    steps = f"Steps {overlap['first_step']} to {overlap['end_step'] - 1}, by {overlap['source']}."
    figures = folded_table(
        headers,
        overlap["ranks"],
        _rank,
        lambda rank: float(rank["exposed_ns"]),
        "Overlap by rank",
        range(1, len(headers)),
    )
    return joined([tag("p", steps), figures])


def _rank(rank: Mapping[str, Any]) -> list[object]:
    return [
        f"rank {rank['rank']}",
        *map(time_text, (rank["span_ns"], rank["compute_ns"], rank["comm_ns"], rank["overlap_ns"])),
        percent_text(rank["overlap_pct"]),
        *map(time_text, (rank["exposed_ns"], rank["wait_ns"], rank["idle_ns"])),
    ]


def _timeline(overlap: Mapping[str, Any]) -> Html:
    # Of many ranks those that come last most often and least often.
    _, drawn = pages(overlap["ranks"], lambda rank: float(rank["last_arrivals"] or 0), "late arrivals")[0]
    ranks = [rank["rank"] for rank in drawn]
    steps = sorted({bucket["step"] for bucket in overlap["buckets"]})[:_MOST_STEPS]
    by_step = [[one for one in overlap["buckets"] if one["step"] == step] for step in steps]
    computing = {rank["rank"]: rank.get("computing") or () for rank in drawn}
    spec = {
        "unit": "ms",
        "kinds": list(_KINDS),
        "rows": [f"rank {rank}" for rank in ranks],
        "windows": [{"spans": _spans(buckets, computing)} for buckets in by_step],
    }
    figures = table(
        ("step", "bucket", "size", "transfer", "skew", "last rank", "bus"),
        [_row(bucket) for bucket in overlap["buckets"][:_MOST_BUCKETS]],
        "Buckets",
        numbers=range(1, 7),
    )
    said = (
        f"{len(overlap['buckets'])} reductions in {len(steps)} steps; each is drawn from the moment its gradients were "
        f"ready to its end{', over what the rank computed' if any(computing.values()) else ''}."
    )
    if len(overlap["ranks"]) > MOST_ROWS:
        said += f" {MOST_ROWS} ranks are drawn: those that come last most often, and least often."
    shown = _KINDS if any(computing.values()) else _KINDS[1:]
    key = [(str(kind["colour"]), str(kind["label"])) for kind in shown]
    choices = [f"step {step}" for step in steps] if len(steps) > 1 else []
    return chart("lanes", "DDP's buckets on one timeline", said, spec, figures, key, choices)


def _spans(
    buckets: Sequence[Mapping[str, Any]], computing: Mapping[int, Sequence[Sequence[int]]]
) -> list[list[object]]:
    place = {rank: number for number, rank in enumerate(computing)}
    parts = [(bucket, part) for bucket in buckets for part in bucket["ranks"] if part["rank"] in place]
    first = min((min(part["start_ns"], part["ready_ns"] or part["start_ns"]) for _, part in parts), default=0)
    last = max((part["end_ns"] for _, part in parts), default=0)
    # What was computed shortly before and after belongs to the picture.
    around = (last - first) // 4 if any(computing.values()) else 0
    began, ended = first - around, last + around
    spans: list[list[object]] = [
        [place[rank], (max(start, began) - began) / 1e6, (min(end, ended) - began) / 1e6, _COMPUTE]
        for rank, pieces in computing.items()
        for start, end in pieces
        if start < ended and end > began
    ]
    return spans + [span for bucket, part in parts for span in _reduction(bucket, part, place, began)]


def _reduction(
    bucket: Mapping[str, Any], part: Mapping[str, Any], place: Mapping[int, int], began: int
) -> list[list[object]]:
    """One rank's part in the reduction of a bucket, from its last gradient to its end."""
    start, end = part["start_ns"], part["end_ns"]
    hidden = 100 * part["hidden_ns"] / max(1, end - start)
    label = f"bucket {bucket['bucket']}, {optional_size_text(bucket['bytes'])}, {hidden:.0f} % hidden"
    ready = start if part["ready_ns"] is None else min(start, part["ready_ns"])
    arrived = min(end, start + (part["wait_ns"] or 0))
    stretches = ((_QUEUED, ready, start), (_WAITING, start, arrived), (_TRANSFER, arrived, end))
    return [
        [place[part["rank"]], (first - began) / 1e6, (last - began) / 1e6, kind, label]
        for kind, first, last in stretches
        if last > first
    ]


def _row(bucket: Mapping[str, Any]) -> list[object]:
    return [
        f"step {bucket['step']}",
        bucket["bucket"],
        optional_size_text(bucket["bytes"]),
        time_text(bucket["transfer_ns"]),
        time_text(bucket["skew_ns"]),
        "" if bucket["last_rank"] is None else bucket["last_rank"],
        rate_text(bucket["busbw_gbps"]),
    ]
