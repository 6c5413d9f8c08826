"""Nodes compare their snapshots through a store: both record a mismatch, and memory stays bounded."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddpcheck.agent.shm_exchange import ShmExchange, create_exchange
from ddpcheck.probes.live_compare import store
from ddpcheck.probes.live_compare.node import Snapshot, SnapshotKey
from ddpcheck.probes.live_compare.store import StoreCompare
from ddpcheck.records.kinds.digests import Stage, TensorKind
from ddpcheck.records.kinds.rank import NodeMismatchRecord, NodesRecord
from ddpcheck.records.registry import Record
from tests.helpers.fake_context import FakeContext, watch


class Nodes:
    """Two ranks, each alone in the exchange of its node."""

    def __init__(
        self,
        folder: Path,
        algorithms: tuple[str, str] = ("xxh3", "xxh3"),
        names: tuple[str, str] = ("node0", "node1"),
    ) -> None:
        self.store: Any = torch.distributed.HashStore()  # type: ignore[attr-defined]
        self.module = nn.Linear(2, 2)
        self.tracked = watch(self.module)
        self.contexts: list[FakeContext] = []
        self.nodes: list[StoreCompare] = []
        for rank, algorithm in enumerate(algorithms):
            create_exchange(folder / f"exchange{rank}")
            context = FakeContext(folder, rank)
            context.exchange = ShmExchange(folder / f"exchange{rank}", rank)
            self.contexts.append(context)
            self.nodes.append(StoreCompare(context, self.store, names[rank], algorithm))

    def publish(self, rank: int, step: int, root: bytes = b"same", stage: Stage = Stage.PARAMS) -> None:
        key = SnapshotKey(self.tracked, stage, TensorKind.PARAMETERS, step, 0)
        self.nodes[rank].publish(Snapshot(key, key.hash("s"), root.ljust(16), [], b""))

    def end(self) -> None:
        for node in self.nodes:
            node._over.set()
            node._wake.set()
        for node in self.nodes:
            assert node._ended.wait(60)


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "POLL_SECONDS", 0.02)


def test_both_nodes_record_a_mismatch_and_the_first_one(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    for step in range(3):
        nodes.publish(0, step)
    # Rank 0 is ahead: only the other rank can see the mismatch, and must report it.
    until(lambda: len(nodes.nodes[0]._own_keys) == 3)
    nodes.publish(1, 0)
    nodes.publish(1, 1, b"other")
    nodes.publish(1, 2, b"another")
    until(lambda: nodes.nodes[1]._compared == 3 and nodes.nodes[0]._notice)
    nodes.end()
    for rank, context in enumerate(nodes.contexts):
        first = min(context.of(NodeMismatchRecord), key=lambda record: record.step)
        assert (first.step, first.stage, first.other_rank) == (1, "params", 1 - rank)
        assert bytes.fromhex(first.root).strip() == (b"same", b"other")[rank]
        assert bytes.fromhex(first.other_root).strip() == (b"other", b"same")[rank]
        assert nodes.nodes[rank].take_mismatches()


def test_nodes_that_agree_record_placements_and_the_number_of_comparisons(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    for step in range(5):
        nodes.publish(0, step)
        nodes.publish(1, step)
    until(lambda: all(node._compared == 5 for node in nodes.nodes))
    nodes.end()
    for rank, context in enumerate(nodes.contexts):
        assert not context.of(NodeMismatchRecord)
        assert list(context.of(NodesRecord)[-1].others) == [str(1 - rank)]
        assert context.of(NodesRecord)[-1].compared == 5


def test_rank_0_stays_until_the_others_have_read_the_last_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store may be in its process."""
    monkeypatch.setattr(store, "WAIT_SECONDS", 60.0)
    nodes = Nodes(tmp_path)
    for rank in range(2):
        nodes.publish(rank, 0)
    until(lambda: all(node._compared for node in nodes.nodes))
    first, second = nodes.nodes
    writing, may_write = threading.Event(), threading.Event()
    write = nodes.contexts[1].write

    def write_late(record: Record) -> None:
        if isinstance(record, NodesRecord) and record.compared:
            writing.set()
            assert may_write.wait(60)
        write(record)

    nodes.contexts[1].write = write_late  # type: ignore[method-assign]
    for node in nodes.nodes:
        node._over.set()
        node._wake.set()
    assert writing.wait(60)
    # It has recorded its own end, and waits for the other.
    until(lambda: any(record.compared for record in nodes.contexts[0].of(NodesRecord)))
    assert not first._ended.is_set()
    may_write.set()
    assert first._ended.wait(60)
    assert second._ended.wait(60)
    assert nodes.contexts[1].of(NodesRecord)[-1].compared == 1


def test_digests_of_different_algorithms_are_not_compared(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, ("xxh3", "multilinear"))
    nodes.publish(0, 0, b"one")
    nodes.publish(1, 0, b"two")
    until(lambda: all(node._compared for node in nodes.nodes))
    nodes.end()
    assert not any(context.of(NodeMismatchRecord) for context in nodes.contexts)


def test_old_keys_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_KEYS", 4)
    nodes = Nodes(tmp_path)
    for step in range(40):
        nodes.publish(0, step)
    until(lambda: nodes.nodes[0]._compared == 40)
    assert nodes.store.num_keys() < 20
    nodes.end()


def test_one_node_alone_writes_nothing(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, names=("the same node", "the same node"))
    nodes.publish(0, 0)
    nodes.end()
    assert nodes.contexts[0].records == []


def test_a_lost_store_ends_the_comparison_without_a_fault(tmp_path: Path) -> None:
    class Gone:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("Connection reset by peer")

    context = FakeContext(tmp_path)
    node = StoreCompare(context, Gone(), "node0", "xxh3")
    assert node._ended.wait(60)
    assert context.records == []


def test_the_lowest_rank_of_a_node_represents_a_module(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    assert nodes.nodes[0]._is_representative((0, 1))
    assert nodes.nodes[1]._is_representative((0, 1))
    exchange = nodes.contexts[1].exchange
    assert exchange is not None
    exchange.ranks = lambda: {0, 1}  # type: ignore[method-assign]
    assert not nodes.nodes[1]._is_representative((0, 1))
    assert nodes.nodes[1]._is_representative((1, 5))
    nodes.end()
