"""Mismatches between two ranks in one exchange: evidence is recorded in time, and no rank waits."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ddpcheck.agent.shm_exchange import ShmExchange, create_exchange
from ddpcheck.probes.live_compare import node, tensor_dump
from ddpcheck.probes.parameters import SHORT_WAIT_SECONDS, ParameterProbe
from ddpcheck.probes.probe import Probe
from ddpcheck.probes.scan.scanner import Scan
from ddpcheck.records.codecs import unpack_leaves, unpack_samples
from ddpcheck.records.kinds.digests import CaptureRecord, DetailRecord, TensorKind
from ddpcheck.records.registry import Record
from tests.helpers.fake_context import FakeContext, Job


class ExchangeOfOneProcess(ShmExchange):
    """Locks belong to processes; ranks that share one need fixed slots."""

    slots = 0

    def _claim(self) -> int:
        ExchangeOfOneProcess.slots += 1
        return ExchangeOfOneProcess.slots - 1


class Pair:
    """Two ranks with the same module in one process."""

    def __init__(self, folder: Path, **config: object) -> None:
        create_exchange(folder / "board")
        ExchangeOfOneProcess.slots = 0
        self.boards = [ExchangeOfOneProcess(folder / "board", rank) for rank in (0, 1)]
        self.modules = [self._module(), self._module()]
        self.contexts = [FakeContext(folder, rank, self.boards[rank], **config) for rank in (0, 1)]
        self.jobs = [Job(self.modules[rank], self.contexts[rank]) for rank in (0, 1)]
        self.optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in self.modules]

    @staticmethod
    def _module() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))

    def wrap(self) -> None:
        for job in self.jobs:
            job.wrapped()

    def step(self, rank: int, gradient: float = 1.0, outlier: float | None = None) -> None:
        for parameter in self.modules[rank].parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        if outlier is not None:
            self.modules[rank][1].bias.grad[1] = outlier
        self.jobs[rank].step(self.optimizers[rank])

    def probe(self, rank: int) -> ParameterProbe:
        return next(probe for probe in self.contexts[rank].probes if isinstance(probe, ParameterProbe))

    def kept(self, rank: int) -> list[Record]:
        """Of the parameters: gradients have a budget of their own."""
        kept = [r for r in self.contexts[rank].records if isinstance(r, DetailRecord | CaptureRecord)]
        return [record for record in kept if record.of != TensorKind.GRADIENTS.value]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path)
    yield pair
    for board in pair.boards:
        board.close()


def test_ranks_that_agree_write_no_evidence(pair: Pair) -> None:
    pair.wrap()
    for _ in range(5):
        for rank in (0, 1):
            pair.jobs[rank].forward()
        for rank in (0, 1):
            pair.step(rank)
    assert pair.kept(0) == pair.kept(1) == []


def test_before_the_broadcast_ranks_may_differ(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    with torch.no_grad():
        for module in pair.modules:
            module[0].weight.zero_()
    pair.wrap()
    assert pair.kept(0) == pair.kept(1) == []


def test_both_sides_keep_the_differing_tensors_of_that_very_step(pair: Pair, tmp_path: Path) -> None:
    pair.wrap()
    for rank in (0, 1):
        pair.step(rank)
    pair.step(0)
    pair.step(1, outlier=5.0)
    pair.jobs[0].forward()
    for rank in (0, 1):
        detail, capture = pair.kept(rank)
        assert isinstance(detail, DetailRecord)
        assert isinstance(capture, CaptureRecord)
        assert (detail.step, capture.step, capture.stage) == (1, 1, "params")
        assert (capture.tensors, capture.cut) == ([3], [])
        assert len(unpack_leaves(detail.leaves, detail.width)) == 4
        bias = pair.modules[rank][1].bias.detach()
        assert unpack_samples(detail.samples)[3] == bias.numpy().tobytes()
        kept = load_file(tmp_path / capture.file)
        assert kept.keys() == {"1.bias"}
        assert torch.equal(kept["1.bias"], bias)


def test_a_rank_that_is_ahead_records_its_digests_and_dumps_the_next_step(pair: Pair, tmp_path: Path) -> None:
    pair.wrap()
    pair.step(0)
    first = pair.modules[0][1].bias.detach().clone()
    pair.step(0)
    pair.step(1, outlier=5.0)
    pair.step(0)
    details = [record for record in pair.kept(0) if isinstance(record, DetailRecord)]
    captures = [record for record in pair.kept(0) if isinstance(record, CaptureRecord)]
    assert details[0].step == 0
    assert unpack_samples(details[0].samples)[3] == first.numpy().tobytes()
    assert [record.step for record in captures] == [2]
    assert torch.equal(load_file(tmp_path / captures[0].file)["1.bias"], pair.modules[0][1].bias)


def test_what_differed_is_dumped_first_at_a_later_step(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large tensors that are equal must not use up the limit of bytes."""
    monkeypatch.setattr(tensor_dump, "BUDGET", 4 * 3)
    pair.wrap()
    pair.step(0)
    pair.step(0)
    pair.step(1, outlier=5.0)
    pair.step(0)
    captures = [record for record in pair.kept(0) if isinstance(record, CaptureRecord)]
    assert [record.step for record in captures] == [2]
    dumped = load_file(tmp_path / captures[0].file)
    assert torch.equal(dumped["1.bias"], pair.modules[0][1].bias)


def test_on_a_device_the_dumped_values_are_those_of_the_stated_step(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Digests of a device arrive when the next steps have changed the values."""
    asked: Counter[int] = Counter()

    def late(scan: Scan) -> bool:
        asked[id(scan)] += 1
        scans.append(scan)
        return asked[id(scan)] > 2

    scans: list[Scan] = []  # kept, so that ids stay unique
    monkeypatch.setattr(Scan, "ready", late)
    pair.wrap()
    biases = []
    for _ in range(12):
        for rank, outlier in ((0, None), (1, 5.0)):
            pair.step(rank, outlier=outlier)
        biases.append([module[1].bias.detach().clone() for module in pair.modules])
    captures = [
        (rank, record) for rank in (0, 1) for record in pair.kept(rank) if isinstance(record, CaptureRecord)
    ]
    assert {rank for rank, _ in captures} == {0, 1}
    for rank, record in captures:
        dumped = load_file(tmp_path / record.file)["1.bias"]
        assert torch.equal(dumped, biases[record.step][rank])


def test_on_a_device_the_dumped_gradients_are_those_of_the_stated_step(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: Counter[int] = Counter()

    def late(scan: Scan) -> bool:
        asked[id(scan)] += 1
        scans.append(scan)
        return asked[id(scan)] > 2

    scans: list[Scan] = []
    monkeypatch.setattr(Scan, "ready", late)
    pair.wrap()
    for step in range(12):
        for rank, outlier in ((0, None), (1, 5.0)):
            pair.step(rank, gradient=step / 8, outlier=outlier)
    for rank, outlier in ((0, None), (1, 5.0)):
        captures = [
            record
            for record in pair.contexts[rank].records
            if isinstance(record, CaptureRecord) and record.of == TensorKind.GRADIENTS.value
        ]
        assert captures
        for record in captures:
            second = record.step / 8 if outlier is None else outlier
            assert load_file(tmp_path / record.file)["1.bias"].tolist() == [record.step / 8, second]


def test_a_mismatch_reported_after_the_model_was_deleted(pair: Pair) -> None:
    """The mismatch is recorded, but no tensors are left to dump."""
    pair.wrap()
    pair.step(0)
    pair.jobs[0].tracked.forget()
    pair.step(1, outlier=5.0)
    assert pair.contexts[0].node_compare is not None
    pair.contexts[0].node_compare.catch_up()
    assert [type(record) for record in pair.kept(0)] == [DetailRecord]


def test_a_disagreement_that_lasts_does_not_fill_the_disk(pair: Pair) -> None:
    pair.wrap()
    for _ in range(30):
        for rank in (0, 1):
            pair.jobs[rank].forward()
            pair.step(rank, outlier=5.0 * rank)
    for rank in (0, 1):
        kept = pair.kept(rank)
        assert len([r for r in kept if isinstance(r, DetailRecord)]) == node.MAX_DETAILS
        assert len([r for r in kept if isinstance(r, CaptureRecord)]) == node.MAX_CAPTURES


def test_memory_does_not_grow_with_steps(pair: Pair) -> None:
    pair.wrap()
    for _ in range(300):
        for rank in (0, 1):
            pair.step(rank)
    compare = pair.probe(0)._node_compare
    assert compare is not None
    assert len(compare._own._items) == 64
    assert len(compare._received._items) == 256
    assert all(len(entries) == 1 for entries in compare._received._items.values())


@pytest.mark.parametrize("fail_fast", [True, False])
def test_fail_fast_holds_the_rank_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fail_fast: bool
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(node.time, "sleep", slept.append)
    pair = Pair(tmp_path, fail_fast=fail_fast)
    pair.wrap()
    for _ in range(3):
        for rank in (0, 1):
            pair.step(rank, outlier=5.0 * rank)
    assert slept == ([node.HOLD_SECONDS] * 2 if fail_fast else [])


def test_at_the_end_a_rank_waits_for_its_peers(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    sleep = time.sleep
    monkeypatch.setattr(node.time, "sleep", lambda seconds: (slept.append(seconds), sleep(seconds)))
    pair.wrap()
    for rank in (0, 1):
        pair.step(rank)
        pair.jobs[rank].forward()
    pair.contexts[0].emit(Probe.before_exit)
    assert slept == []
    pair.step(0)
    started = time.monotonic()
    pair.contexts[0].emit(Probe.before_exit)
    assert slept
    assert time.monotonic() - started >= SHORT_WAIT_SECONDS
