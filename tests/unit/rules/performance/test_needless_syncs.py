"""DDP407 to DDP409: searches, broadcasts and waits that a job may not need."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpcheck.records.kinds.needless import HostWait, HostWaitsRecord, ModuleSyncsRecord
from tests.helpers.run_builder import RunBuilder
from tests.unit.rules.performance.test_ddp406 import STEPS, run


def job(folder: Path, step_us: int = 40_000) -> RunBuilder:
    return run(folder, [1], wait_us=step_us // 10, step_us=step_us)


def with_syncs(folder: Path, by_rank: list[dict[str, int]], step_us: int = 40_000) -> RunBuilder:
    build = job(folder, step_us)
    for rank, values in enumerate(by_rank):
        build.add(rank, ModuleSyncsRecord(module=0, step=STEPS, **values))  # type: ignore[arg-type]
    return build.end()


@pytest.mark.parametrize(("search_us", "severity"), [(40_000, "note"), (400_000, "warning")])
def test_a_search_that_finds_nothing(tmp_path: Path, search_us: int, severity: str) -> None:
    values = {"searches": STEPS, "all_used": STEPS, "search_us": search_us}
    [found] = with_syncs(tmp_path, [values, values]).findings("DDP407")
    assert (found.severity.value, found.ranks, found.step) == (severity, (0, 1), None)
    assert found.evidence["cost_ms"] == search_us / STEPS / 1000
    assert found.evidence["share"] == search_us / STEPS / 40_000


@pytest.mark.parametrize(
    "other",
    [
        # Unused once, on one rank; too few backwards; no option on this rank.
        {"searches": STEPS, "all_used": STEPS - 1},
        {"searches": 19, "all_used": 19},
        {"searches": 0, "all_used": 0},
    ],
)
def test_a_search_that_may_be_needed(tmp_path: Path, other: dict[str, int]) -> None:
    build = with_syncs(tmp_path, [{"searches": STEPS, "all_used": STEPS, "search_us": 9000}, other])
    assert build.findings("DDP407") == []


def test_a_rank_without_a_record_proves_nothing(tmp_path: Path) -> None:
    build = with_syncs(tmp_path, [{"searches": STEPS, "all_used": STEPS, "evaluations": 20}])
    assert build.findings("DDP407") == build.findings("DDP408") == []


@pytest.mark.parametrize(("broadcast_us", "severity"), [(20_000, "note"), (800_000, "warning")])
def test_broadcasts_in_evaluations(tmp_path: Path, broadcast_us: int, severity: str) -> None:
    late = {"evaluations": 20, "broadcast_us": 4 * broadcast_us}
    last = {"evaluations": 20, "broadcast_us": broadcast_us}
    [found] = with_syncs(tmp_path, [late, last]).findings("DDP408")
    # The rank that waits least shows what the broadcast itself takes.
    assert found.evidence["broadcast_ms"] == broadcast_us / 20 / 1000
    assert (found.severity.value, found.stage, found.ranks) == (severity, "buffers", (0, 1))


def test_few_evaluations(tmp_path: Path) -> None:
    assert with_syncs(tmp_path, [{"evaluations": 7, "broadcast_us": 9}] * 2).findings("DDP408") == []


def waits(folder: Path, by_rank: list[list[list[str | int]]], steps: int = 24) -> RunBuilder:
    build = job(folder)
    for rank, sites in enumerate(by_rank):
        build.add(rank, HostWaitsRecord(5, steps, sites))
    return build.end()


BARRIER, DEVICE = HostWait.BARRIER.value, HostWait.DEVICE.value


@pytest.mark.parametrize(("wait_us", "severity"), [(24_000, "note"), (240_000, "warning")])
def test_a_barrier_in_every_step(tmp_path: Path, wait_us: int, severity: str) -> None:
    early = [[BARRIER, "barrier", "/home/me/train.py:9", 24, 24, 5 * wait_us]]
    late = [
        [BARRIER, "barrier", "/home/me/train.py:9", 12, 12, wait_us // 2],
        [BARRIER, "barrier", "/home/me/train.py:11", 12, 12, wait_us // 2],
    ]
    [found] = waits(tmp_path, [early, late]).findings("DDP409")
    assert (found.severity.value, found.stage, found.ranks) == (severity, "barrier", (0, 1))
    assert found.evidence["wait_ms"] == wait_us / 24 / 1000
    assert found.evidence["calls"][0]["where"] == "/home/me/train.py:9"


@pytest.mark.parametrize(
    ("sites", "steps"),
    [
        ([[BARRIER, "barrier", "a.py:9", 3, 3, 900_000]], 24),
        ([[BARRIER, "barrier", "a.py:9", 6, 6, 900_000]], 6),
        ([[DEVICE, "item", "a.py:9", 24, 24, 4_000]], 24),
        ([], 24),
    ],
)
def test_waits_that_are_rare_short_or_not_known(
    tmp_path: Path, sites: list[list[str | int]], steps: int
) -> None:
    assert waits(tmp_path, [sites, sites], steps).findings("DDP409") == []


def test_waits_for_the_device_are_a_note(tmp_path: Path) -> None:
    sites: list[list[str | int]] = [
        [DEVICE, "item", "/home/me/train.py:9", 24, 48, 720_000],
        [DEVICE, "synchronize", "/home/me/train.py:12", 24, 24, 24_000],
    ]
    [found] = waits(tmp_path, [sites, []]).findings("DDP409")
    assert (found.severity.value, found.stage, found.ranks) == ("note", "device", (0,))
    assert found.evidence["wait_ms"] == 31.0
    assert [call["function"] for call in found.evidence["calls"]] == ["item", "synchronize"]
    assert found.evidence["calls"][0]["calls_per_step"] == 2


@pytest.mark.parametrize(("wait_us", "share"), [(24_000, True), (24_000_000, False)])
def test_no_wait_is_a_share_above_one(tmp_path: Path, wait_us: int, share: bool) -> None:
    """Waits are measured at some steps, which may be slow ones."""
    sites: list[list[str | int]] = [[DEVICE, "item", "/home/me/train.py:9", 24, 24, wait_us]]
    [found] = waits(tmp_path, [sites, sites]).findings("DDP409")
    assert ("% of" in found.message) == share
    assert ("slow steps" in found.message) != share
