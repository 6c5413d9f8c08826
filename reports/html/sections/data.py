"""The data split: how the samples of each epoch were dealt out to the ranks."""

from __future__ import annotations

from ddpcheck.analysis.report import DataEpoch
from ddpcheck.reports.html.context import PageContext
from ddpcheck.reports.html.markup import Html, joined, table, tag
from ddpcheck.reports.terminal.data import alike_epochs
from ddpcheck.reports.terminal.evidence import spoken_by_rank


def section(made: PageContext) -> Html | None:
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
    rows = map(_row, alike_epochs(epochs))
    return joined([legend, table(headers, rows, "Data by epoch", numbers=(3, 5, 6, 7))])


def _row(group: list[DataEpoch]) -> list[object]:
    epoch, last = group[0], group[-1]
    about = "" if epoch.exact else "about "
    span = f"{epoch.epoch}-{last.epoch}" if last is not epoch else f"{epoch.epoch}"
    return [
        span + ("" if epoch.complete else " (left early)"),
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
