"""The data split: how many samples of each epoch each rank drew."""

from __future__ import annotations

from collections.abc import Sequence

from ddpcheck.analysis.data.collector import MOST_ROWS
from ddpcheck.analysis.report import DataEpoch, Report
from ddpcheck.reports.views.evidence import by_rank_text
from ddpcheck.reports.views.table import Column, Row, Table, row

_LEGEND = (
    "Overlap: samples that more than one rank drew. Missing: samples that no rank drew. "
    "Padding: draws beyond one for each sample."
)


def data_table(report: Report) -> Table | None:
    """Consecutive epochs with equal figures share a row; None if no data loader was recorded."""
    if not report.data:
        return None
    several = len({(epoch.module, epoch.loader) for epoch in report.data}) > 1
    columns = (
        Column("epoch"),
        Column("module", detail=not several),
        Column("loader", detail=not several),
        Column("samples", number=True),
        Column("ranks", number=True),
        Column("per rank", "samples per rank", number=True),
        Column("samples by rank", detail=True),
        Column("overlap", number=True),
        Column("missing", number=True),
        Column("padding", number=True),
        Column("sampler"),
    )
    rows = tuple(_row(group) for group in epoch_groups(report.data))
    # report.json holds as many.
    cut = (f"The first {MOST_ROWS} epochs are listed.",) if len(report.data) >= MOST_ROWS else ()
    return Table("Data", columns, rows, legend=_LEGEND, noun="groups of epochs", notes=cut)


def epoch_groups(epochs: Sequence[DataEpoch]) -> list[list[DataEpoch]]:
    """Consecutive epochs with equal figures, together."""
    groups: list[list[DataEpoch]] = []
    for epoch in epochs:
        last = groups[-1][-1] if groups else None
        if last is not None and _figures(last) == _figures(epoch) and last.epoch == epoch.epoch - 1:
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


def _row(group: list[DataEpoch]) -> Row:
    first, last = group[0], group[-1]
    epochs = str(first.epoch) if last is first else f"{first.epoch}-{last.epoch}"
    counts = sorted(set(first.per_rank.values()))
    per_rank = None if not counts else str(counts[0]) if len(counts) == 1 else f"{counts[0]}-{counts[-1]}"
    return row(
        [
            epochs + ("" if first.complete else " (incomplete)"),
            first.module,
            first.loader,
            "unknown" if first.samples < 0 else first.samples,
            first.ranks,
            per_rank,
            by_rank_text(first.per_rank),
            _count(first.overlap, first.exact),
            _count(first.missing, first.exact),
            _count(first.padding),
            first.sampler,
        ]
    )


def _count(count: int | None, exact: bool = True) -> str | None:
    return None if count is None else f"{'~' if count and not exact else ''}{count}"
