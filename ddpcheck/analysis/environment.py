"""Compares the environments of ranks: versions, devices and environment variables."""

from __future__ import annotations

from ddpcheck.analysis.aggregate.agreement import groups_of
from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.timeseries.model import EnvironmentRow, EnvironmentValue

_FIELDS = {"python": "Python", "torch": "torch", "backend": "backend", "algorithm": "digests"}
# These differ on every rank.
PER_RANK = frozenset({"RANK", "LOCAL_RANK", "ROLE_RANK", "GROUP_RANK"})
MOST_VALUES = 8


def environment_rows(attempt: Attempt) -> tuple[EnvironmentRow, ...]:
    """For each property, ranks grouped by value, the most common value first."""
    headers = {rank: data.header for rank, data in attempt.ranks.items()}
    values = {
        title: {rank: str(getattr(header, field)) for rank, header in headers.items()}
        for field, title in _FIELDS.items()
    }
    # Only the type of the device: cuda:0 to cuda:7 are equal.
    values["device"] = {rank: header.device.partition(":")[0] for rank, header in headers.items()}
    values["hosts"] = {rank: header.host for rank, header in headers.items()}
    names = sorted({name for header in headers.values() for name in header.environment} - PER_RANK)
    for name in names:
        values[name] = {rank: header.environment.get(name, "") for rank, header in headers.items()}
    return tuple(
        EnvironmentRow(
            name, tuple(EnvironmentValue(value, ranks) for value, ranks in groups_of(by_rank)[:MOST_VALUES])
        )
        for name, by_rank in values.items()
        if by_rank
    )
