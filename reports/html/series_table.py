"""Lines of a chart in figures: the least, the median, the most and the last of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from ddpcheck.reports.html.markup import Html, table

_MOST_ROWS = 64


def series_table(series: Mapping[str, Sequence[float | None]], label: str, unit: str = "") -> Html:
    """One row a line; very many are cut, since each is in report.json."""
    rows = []
    for name, values in list(series.items())[:_MOST_ROWS]:
        known = [value for value in values if value is not None]
        if known:
            rows.append([name, *map(figure, (min(known), median(known), max(known), known[-1]))])
        else:
            rows.append([name, "-", "-", "-", "-"])
    if len(series) > _MOST_ROWS:
        rows.append([f"and {len(series) - _MOST_ROWS} more, in report.json", "", "", "", ""])
    of = f" ({unit})" if unit else ""
    headers = ("", f"least{of}", f"median{of}", f"most{of}", f"last{of}")
    return table(headers, rows, label, numbers=(1, 2, 3, 4))


def figure(value: float) -> str:
    return f"{value:.4g}"
