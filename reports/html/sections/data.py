"""The data split: how the samples of each epoch were dealt out to the ranks."""

from __future__ import annotations

from ddpcheck.analysis.result import DataEpoch
from ddpcheck.reports.html.markup import Html, joined, table, tag
from ddpcheck.reports.html.material import Material
from ddpcheck.reports.terminal_values import spoken_by_rank


def section(made: Material) -> Html | None:
    epochs = made.report.data
    if not epochs:
        return None
    headers = ("epoch", "module", "loader", "samples", "per rank", "overlap", "missing", "padding", "sampler")
    legend = tag(
        "p",
        "Overlap: samples that several ranks drew. Missing: samples that none drew. Padding: draws beyond one for "
        "each sample.",
        class_="quiet",
    )
    return joined([legend, table(headers, map(_row, epochs), "Data by epoch", numbers=(3, 5, 6, 7))])


def _row(epoch: DataEpoch) -> list[object]:
    about = "" if epoch.exact else "about "
    return [
        f"{epoch.epoch}" + ("" if epoch.complete else " (left early)"),
        epoch.module,
        epoch.loader,
        "unknown" if epoch.samples < 0 else epoch.samples,
        spoken_by_rank(epoch.per_rank),
        _told(epoch.overlap, about),
        _told(epoch.missing, about),
        _told(epoch.padding, ""),
        epoch.sampler,
    ]


def _told(count: int | None, about: str) -> str:
    return "-" if count is None else f"{about if count else ''}{count}"
