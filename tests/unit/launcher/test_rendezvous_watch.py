"""Ranks that wait in init_process_group for others."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ddpcheck.launcher.process.supervise import StopRequest
from ddpcheck.launcher.rendezvous_watch import RendezvousWatch, possible_ranks
from ddpcheck.records.node_log import NodeLog, node_lines
from ddpcheck.records.rendezvous import JOINING_FILES

TIMEOUT = 10.0


class Watched:
    """Two of three ranks wait; both notes are of this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = NodeLog(folder)
        self.now = 100.0
        self.others: list[int] = []
        self.watch = RendezvousWatch(
            folder, self.log.host, self.log, TIMEOUT, lambda: self.now, lambda waiting: self.others
        )

    def joins(self, number: int, **changes: Any) -> Path:
        note = {
            "rank": number,
            "world_size": 3,
            "host": self.log.host,
            "pid": os.getpid(),
            "where": "train.py:9",
        }
        path = self.folder / JOINING_FILES.replace("*", f"x-{number}")
        path.write_text(json.dumps({**note, "one_host": True, **changes}), encoding="utf-8")
        return path

    def after(self, seconds: float) -> StopRequest | None:
        self.now += seconds
        return self.watch.tick()

    def logged(self) -> list[dict[str, Any]]:
        self.log.close()
        lines = [json.loads(line) for _, line in node_lines(self.folder)]
        return [line for line in lines if line["kind"] == "rendezvous"]


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


def test_the_job_is_stopped_if_nobody_can_come(watched: Watched) -> None:
    watched.joins(1)
    assert watched.after(0) is None
    assert watched.after(TIMEOUT - 1) is None
    request = watched.after(2)
    assert request is not None
    [line] = watched.logged()
    assert (line["waiting"], line["missing"], line["world_size"], line["stopped"]) == ([1], [0, 2], 3, True)
    assert (line["seconds"], line["where"]) == (TIMEOUT + 1, "train.py:9")


def test_a_process_that_may_become_a_rank(watched: Watched) -> None:
    """It may be slow. What it waits for is logged, once."""
    watched.joins(1)
    watched.others = [4711]
    for _ in range(5):
        assert watched.after(TIMEOUT) is None
    [line] = watched.logged()
    assert (line["processes"], line["stopped"]) == ([4711], False)


@pytest.mark.parametrize(
    "changes", [{"one_host": False}, {"host": "another"}, {"pid": 2**22 + 1}, {"rank": "x"}]
)
def test_what_is_not_known_to_hang(watched: Watched, changes: dict[str, Any]) -> None:
    watched.joins(1, **changes)
    watched.after(0)
    assert watched.after(2 * TIMEOUT) is None


def test_ranks_that_have_joined_do_not_wait(watched: Watched) -> None:
    path = watched.joins(1)
    watched.after(0)
    path.unlink()
    assert watched.after(2 * TIMEOUT) is None
    assert watched.logged() == []


def test_this_process_is_no_possible_rank_of_its_own() -> None:
    assert os.getpid() not in possible_ranks(set())
