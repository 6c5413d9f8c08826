"""The anatomy of a step: where each rank's time went, who is late, and what the ranks together come to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from ddpcheck.formatting import name_ranks
from ddpcheck.reports.html.chart import chart
from ddpcheck.reports.html.context import PageContext
from ddpcheck.reports.html.markup import Html, joined, table, tag
from ddpcheck.reports.html.table import Row, pages

# Of a step: what a rank takes longer shows in the darkest colour from here on. Less is no delay worth a look.
_DARKEST = 0.05
# Where the name of a part would not make a sentence.
_SPOKEN = {"data": "data loading", "other": "code between the parts"}
# Part, what it is called, its colour, and how tall its bar is.
_PARTS = (
    ("data", "data loading", "line-5", 0.8),
    ("forward", "forward", "line-3", 0.8),
    ("backward", "backward", "line-1", 0.8),
    ("optimizer", "optimizer", "line-4", 0.8),
    ("other", "other", "absent", 0.5),
    ("wait", "waiting and communication", "error", 0.3),
)


def section(made: PageContext) -> Html | None:
    tables = made.document.get("time") or ()
    drawn = [part for one in tables if one["ranks"] for part in _group(one, len(tables) > 1)]
    return joined(drawn) if drawn else None


def _group(one: Mapping[str, Any], several: bool) -> list[Html | None]:
    of = f", {name_ranks(one['group'])}" if several else ""
    return [_anatomy(one, of), _late(one, of), _scaling(one["scaling"], len(one["ranks"]))]


def _anatomy(one: Mapping[str, Any], of: str) -> Html:
    shown = pages(one["ranks"], lambda row: float(row["parts"]["wait"]["mean_us"]), "waiting")
    spec = {
        "unit": "ms",
        "kinds": [{"label": label, "colour": colour, "share": share} for _, label, colour, share in _PARTS],
        "windows": [
            {"rows": [f"rank {row['rank']}" for row in rows], "spans": _spans(rows)} for _, rows in shown
        ],
    }
    straggler = one.get("straggler")
    late = ""
    if straggler:
        are = "is" if len(straggler["ranks"]) == 1 else "are"
        part = _SPOKEN.get(straggler["part"], straggler["part"])
        late = f" {name_ranks(straggler['ranks']).capitalize()} {are} late, in {part}."
    said = f"A typical step takes {one['step_us'] / 1000:.4g} ms; means of {one['steps']} steps.{late}"
    figures = table(
        ("rank", "step", *(label for _, label, _, _ in _PARTS)),
        [_figures(row) for row in one["ranks"]],
        "Milliseconds of a step",
        numbers=range(1, 2 + len(_PARTS)),
    )
    choices = [title for title, _ in shown] if len(shown) > 1 else []
    key = [(colour, label) for _, label, colour, _ in _PARTS]
    return chart("lanes", f"A step, part by part{of}", said, spec, figures, key, choices)


def _spans(rows: Sequence[Row]) -> list[list[object]]:
    spans: list[list[object]] = []
    for number, row in enumerate(rows):
        at = 0.0
        for kind, (part, _, _, _) in enumerate(_PARTS):
            took = row["parts"][part]["mean_us"] / 1000
            if took:
                spans.append([number, round(at, 4), round(at + took, 4), kind])
            at += took
    return spans


def _figures(row: Row) -> list[str]:
    parts = [row["parts"][part]["mean_us"] for part, _, _, _ in _PARTS]
    return [f"rank {row['rank']}", *(f"{value / 1000:.4g}" for value in (row["step"]["mean_us"], *parts))]


def _late(one: Mapping[str, Any], of: str) -> Html | None:
    """What each rank takes longer than the median rank; waiting is what the others do meanwhile."""
    if len(one["ranks"]) < 2:
        return None
    parts = [part for part, _, _, _ in _PARTS if part != "wait"]
    usual = {part: median(row["parts"][part]["median_us"] for row in one["ranks"]) for part in parts}
    over = {
        row["rank"]: [round((row["parts"][part]["median_us"] - usual[part]) / 1000, 4) for part in parts]
        for row in one["ranks"]
    }
    darkest = max(_DARKEST * one["step_us"] / 1000, *map(max, over.values()))
    worst = max(over, key=lambda rank: sum(over[rank]))
    shown = pages(one["ranks"], lambda row: sum(over[row["rank"]]), "delay", only_most=True)
    spec = {
        "columns": parts,
        "xLabel": "part",
        "unit": "ms more than the median rank",
        "low": 0,
        "high": darkest,
        "windows": [
            {
                "rows": [f"rank {row['rank']}" for row in rows],
                "values": [over[row["rank"]] for row in rows],
            }
            for _, rows in shown
        ],
    }
    rows = [[f"rank {rank}", *(f"{value:+.4g}" for value in values)] for rank, values in over.items()]
    figures = table(
        ("", *parts), rows, "Milliseconds above the median rank", numbers=range(1, 1 + len(parts))
    )
    said = f"Rank {worst} takes most over the median, {sum(over[worst]):.4g} ms a step in all parts together."
    key = [("heat-1", "as the median or less"), ("heat-4", "more"), ("heat-6", f"{darkest:.3g} ms more")]
    choices = [title for title, _ in shown] if len(shown) > 1 else []
    caption = f"Milliseconds by which ranks are slower than the median{of}"
    return chart("grid", caption, said, spec, figures, key, choices)


def _scaling(scaling: Mapping[str, float], ranks: int) -> Html | None:
    if ranks < 2:
        return None
    names = ("compute", "data", "other", "exposed_communication", "waiting_for_stragglers")
    shares = ", ".join(f"{name.replace('_', ' ')} {100 * scaling[name]:.0f} %" for name in names)
    return tag(
        "p",
        f"Of a step: {shares}. Scaling efficiency {100 * scaling['efficiency']:.0f} %: {ranks} ranks do the work of "
        f"{scaling['speed_up']:.2f}.",
    )
