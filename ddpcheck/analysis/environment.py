"""The ranks' surroundings side by side: versions, devices and the variables that matter to a job."""

from __future__ import annotations

from ddpcheck.analysis.aggregate.agreement import groups_of
from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.timeseries.model import EnvironmentRow, EnvironmentValue

_FIELDS = {"python": "Python", "torch": "torch", "backend": "backend", "algorithm": "digests"}
# Different on every rank by their nature.
OF_EACH_RANK = frozenset({"RANK", "LOCAL_RANK", "ROLE_RANK", "GROUP_RANK"})
MOST_VALUES = 8


def environment_rows(attempt: Attempt) -> tuple[EnvironmentRow, ...]:
    """Values by the ranks that have them, the most common first."""
    headers = {rank: data.header for rank, data in attempt.ranks.items()}
    said = {
        title: {rank: str(getattr(header, field)) for rank, header in headers.items()}
        for field, title in _FIELDS.items()
    }
    # cuda:0 to cuda:7 are eight devices of one kind.
    said["device"] = {rank: header.device.partition(":")[0] for rank, header in headers.items()}
    said["hosts"] = {rank: header.host for rank, header in headers.items()}
    names = sorted({name for header in headers.values() for name in header.environment} - OF_EACH_RANK)
    for name in names:
        said[name] = {rank: header.environment.get(name, "") for rank, header in headers.items()}
    return tuple(
        EnvironmentRow(
            name, tuple(EnvironmentValue(value, ranks) for value, ranks in groups_of(by_rank)[:MOST_VALUES])
        )
        for name, by_rank in said.items()
        if by_rank
    )
