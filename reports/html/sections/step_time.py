"""Step time: each rank's mean step by phase, and each rank's delay against the median rank."""

from __future__ import annotations

from collections.abc import Sequence

from ddpcheck.analysis.report import Report
from ddpcheck.reports.html.components import Html, chart, joined, pages, rows_table, table, tag
from ddpcheck.reports.views.timing import PHASES, StepTimeView, step_times, work_phases

# A delay of this share of a step, or more, has the darkest colour.
_DARKEST = 0.05
# Colour and height of each phase's bar.
_BARS = {
    "data": ("line-5", 0.8),
    "forward": ("line-3", 0.8),
    "backward": ("line-1", 0.8),
    "optimizer": ("line-4", 0.8),
    "other": ("absent", 0.5),
    "wait": ("error", 0.3),
}
_WAIT = [phase for phase, _, _ in PHASES].index("wait")


def section(report: Report) -> Html | None:
    parts = [part for times in step_times(report) for part in _group(times)]
    return joined(parts) if parts else None


def _group(times: StepTimeView) -> list[Html | None]:
    several = len(times.phases_ms) > 1
    notes = [tag("p", note) for note in times.table.notes]
    return [_phases(times), _delays(times) if several else None, *notes]


def _phases(times: StepTimeView) -> Html:
    shown = pages(list(times.phases_ms), lambda rank: times.phases_ms[rank][_WAIT], "waiting")
    kinds = [
        {"label": label, "colour": _BARS[phase][0], "share": _BARS[phase][1]} for phase, _, label in PHASES
    ]
    spec = {
        "unit": "ms",
        "kinds": kinds,
        "windows": [
            {"rows": [f"rank {rank}" for rank in ranks], "spans": _spans(times, ranks)} for _, ranks in shown
        ],
    }
    choices = [title for title, _ in shown] if len(shown) > 1 else []
    key = [(_BARS[phase][0], label) for phase, _, label in PHASES]
    caption = f"Step time by phase{times.suffix} ({times.table.subtitle})"
    figures = rows_table(times.table, times.table.rows)
    return chart("lanes", caption, times.summary, spec, figures, key, choices)


def _spans(times: StepTimeView, ranks: Sequence[int]) -> list[list[object]]:
    spans: list[list[object]] = []
    for number, rank in enumerate(ranks):
        start = 0.0
        for kind, took in enumerate(times.phases_ms[rank]):
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
