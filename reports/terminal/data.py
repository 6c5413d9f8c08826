"""The table of the data split: epochs that went alike share a row."""

from __future__ import annotations

from collections.abc import Sequence

from ddpcheck.analysis.report import DataEpoch, Report
from ddpcheck.reports.terminal.console import LABEL, ReportConsole, indented

_MOST_ROWS = 8


def put_data(ink: ReportConsole, report: Report) -> None:
    """How many samples each rank drew, and whether they were its own."""
    if not report.data:
        return
    groups = alike_epochs(report.data)
    several = len({(epoch.module, epoch.loader) for epoch in report.data}) > 1
    rows = [_row(group, several) for group in groups[:_MOST_ROWS]]
    ink.gap()
    headers = ["epoch", "samples", "ranks", "per rank", "overlap", "missing", "padding", "sampler"]
    ink.put(ink.text("Data", LABEL), indented(ink.columns(headers, rows)))
    if len(groups) > _MOST_ROWS:
        ink.put(ink.text("more epochs are in report.json"), indent=2)


def alike_epochs(epochs: Sequence[DataEpoch]) -> list[list[DataEpoch]]:
    """Epochs in a row that went alike, together."""
    groups: list[list[DataEpoch]] = []
    for epoch in epochs:
        if groups and _figures(groups[-1][-1]) == _figures(epoch) and groups[-1][-1].epoch == epoch.epoch - 1:
            groups[-1].append(epoch)
        else:
            groups.append([epoch])
    return groups


def _figures(epoch: DataEpoch) -> tuple[object, ...]:
    return (
        epoch.module,
        epoch.loader,
        epoch.samples,
        dict(epoch.per_rank),
        epoch.overlap,
        epoch.missing,
        epoch.padding,
        epoch.complete,
    )


def _row(group: list[DataEpoch], several: bool) -> list[object]:
    first = group[0]
    epochs = str(first.epoch) if len(group) == 1 else f"{first.epoch}-{group[-1].epoch}"
    epochs += "" if first.complete else " (left early)"
    where = f" (module {first.module}, loader {first.loader})" if several else ""
    shares = sorted(set(first.per_rank.values()))
    spread = "-" if not shares else str(shares[0]) if len(shares) == 1 else f"{shares[0]}-{shares[-1]}"
    about = "" if first.exact else "~"
    return [
        epochs,
        "unknown" if first.samples < 0 else first.samples,
        first.ranks,
        spread,
        _told(first.overlap, about),
        _told(first.missing, about),
        _told(first.padding, ""),
        first.sampler + where,
    ]


def _told(count: int | None, about: str) -> str:
    return "-" if count is None else f"{about if count else ''}{count}"
