"""The table of the data distribution: one row per epoch."""

from __future__ import annotations

from typing import Any

from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.data.split import EpochSplit
from ddpcheck.analysis.report import DataEpoch

MOST_ROWS = 50
MOST_RANKS = 64


def data_table(attempt: Attempt) -> tuple[DataEpoch, ...]:
    """The first epochs of each module's loaders, in the order of training."""
    rows = [
        _row(split, attempt.number(module))
        for module, splits in sorted(attempt.data.splits.items())
        for split in splits
        if module in attempt.modules()
    ]
    return tuple(sorted(rows, key=lambda row: (row.step, row.module, row.loader, row.epoch))[:MOST_ROWS])


def _row(split: EpochSplit, module: str) -> DataEpoch:
    return DataEpoch(
        module=module,
        loader=split.loader,
        epoch=split.epoch,
        step=split.step,
        samples=split.samples,
        ranks=len(split.passes),
        per_rank={str(rank): drawn for rank, drawn in list(split.per_rank.items())[:MOST_RANKS]},
        overlap=split.overlap,
        missing=split.missing,
        padding=split.padding,
        complete=split.complete,
        exact=split.exact,
        sampler=str(split.one("sampler") or "several"),
    )


def split_row(split: EpochSplit) -> dict[str, Any]:
    """The row as evidence of a finding."""
    shares = split.per_rank
    return {
        "epoch": split.epoch,
        "samples": split.samples,
        "ranks": sorted(shares),
        "per_rank": {str(rank): drawn for rank, drawn in list(shares.items())[:MOST_RANKS]},
        "overlap": split.overlap,
        "missing": split.missing,
        "padding": split.padding,
        "sampler": split.one("sampler"),
    }
