"""Memory: what each rank held, part by part, and its course over the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddpcheck.reports.html.chart import chart, series_table
from ddpcheck.reports.html.context import PageContext
from ddpcheck.reports.html.markup import Html, joined
from ddpcheck.reports.html.table import folded_table

_FIRST_CHOSEN = 4
_PARTS = ("before", "parameters", "gradients", "buckets", "optimizer_state", "buffers", "rest", "most")


def section(made: PageContext) -> Html | None:
    memory = made.document.get("memory") or {}
    ranks = memory.get("ranks") or []
    if not ranks:
        return None
    return joined(
        [
            _parts(ranks, memory.get("of") or len(ranks)),
            _curve(made, [rank for rank in ranks if rank["curve"]]),
        ]
    )


def _parts(ranks: Sequence[Mapping[str, Any]], of: int) -> Html:
    headers = ("MB", "on", *(part.replace("_", " ") for part in _PARTS))
    numbers = range(2, len(headers))
    label = "Memory by rank"
    return folded_table(headers, ranks, _row, lambda rank: float(rank["most"]), label, numbers, of)


def _row(rank: Mapping[str, Any]) -> list[object]:
    return [f"rank {rank['rank']}", rank["device"], *(_mb(rank.get(part)) for part in _PARTS)]


def _curve(made: PageContext, ranks: Sequence[Mapping[str, Any]]) -> Html | None:
    if not ranks:
        return None
    steps = sorted({step for rank in ranks for step, _ in rank["curve"]})
    curves = {rank["rank"]: {step: round(size / 1e6, 2) for step, size in rank["curve"]} for rank in ranks}
    values = {rank: [curve.get(step) for step in steps] for rank, curve in curves.items()}
    spec = {
        "x": steps,
        "yLabel": "MB",
        "unit": "MB",
        "chosen": [rank for rank in made.named_ranks if rank in values][:_FIRST_CHOSEN],
        "series": [{"label": f"rank {rank}", "rank": rank, "values": line} for rank, line in values.items()],
    }
    growing = [rank["rank"] for rank in ranks if rank.get("growth")]
    where = "allocated on the device" if ranks[0]["measured"] == "allocated" else "resident in the process"
    said = f"Bytes {where} after each step. " + (
        f"{len(growing)} ranks grow." if growing else "No rank grows steadily."
    )
    figures = series_table({f"rank {rank}": line for rank, line in values.items()}, "Memory over steps", "MB")
    return chart("lines", "Memory after each step", said, spec, figures)


def _mb(size: Any) -> str:
    return "-" if not isinstance(size, (int, float)) else f"{size / 1e6:,.1f}"
