"""Ranks of one launch agree on one session name. A restart gets another name in the same store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ddpcheck.agent.identity import session_id
from ddpcheck.records.kinds.rank import is_same_job

SessionOf = Callable[..., str]


@pytest.fixture
def session_of(monkeypatch: pytest.MonkeyPatch) -> SessionOf:
    """The session name of a rank. All ranks share one store unless another is given."""
    shared = dist.HashStore()

    def session_of(rank: int, world_size: int = 2, number: int = 0, store: Any = shared) -> str:
        monkeypatch.setattr(c10d, "_get_default_store", lambda: store)
        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        monkeypatch.setattr(dist, "get_world_size", lambda: world_size)
        return session_id(number)

    return session_of


def test_all_ranks_agree(session_of: SessionOf) -> None:
    assert session_of(0) == session_of(1)


def test_restart_is_another_launch_of_the_same_job(session_of: SessionOf) -> None:
    first = [session_of(rank) for rank in (0, 1)]
    second = [session_of(rank) for rank in (1, 0)]
    third = [session_of(rank) for rank in (0, 1)]
    assert [len(set(names)) for names in (first, second, third)] == [1, 1, 1]
    assert len({first[0], second[0], third[0]}) == 3
    assert len({name[:8] for name in (first[0], second[0], third[0])}) == 3, "file names use these characters"
    assert is_same_job(first[0], second[0])
    assert is_same_job(first[0], third[0])


def test_world_size_changes(session_of: SessionOf) -> None:
    worlds = [{session_of(rank, size) for rank in range(size)} for size in (4, 2, 4)]
    assert [len(names) for names in worlds] == [1, 1, 1]
    assert len(set().union(*worlds)) == 3


def test_consecutive_process_groups(session_of: SessionOf) -> None:
    names = [(session_of(0, number=number), session_of(1, number=number)) for number in (0, 1)]
    assert [first == second for first, second in names] == [True, True]
    assert names[0] != names[1]


def test_another_job(session_of: SessionOf) -> None:
    assert not is_same_job(session_of(0), session_of(0, store=dist.HashStore()))


def test_without_a_usable_store(session_of: SessionOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    first = [session_of(rank, store=None) for rank in (0, 1)]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    second = [session_of(rank, store=None) for rank in (0, 1)]
    assert [len(set(names)) for names in (first, second)] == [1, 1]
    assert first != second
