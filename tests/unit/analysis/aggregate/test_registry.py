"""Collectors are discovered, and receive the records of the classes that they name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpcheck import analysis
from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.aggregate.registry import subscriptions
from ddpcheck.records.kinds.digests import DigestRecord
from ddpcheck.records.kinds.folds import PartRecord
from ddpcheck.records.kinds.modules import JoinRecord, LossRecord, ModuleRecord
from ddpcheck.records.kinds.rank import EndRecord, RankHeader
from ddpcheck.records.registry import Record, record_kinds

HEADER = RankHeader(3, 4, "node0", 7, 1, "a", 1.0)
PACKAGE = "added_by_a_test"
SOURCE = """
from ddpcheck.analysis.aggregate.registry import Collector, collects, collects_per_module
from ddpcheck.records.kinds.modules import JoinRecord
from ddpcheck.records.kinds.modules import LossRecord


class AddedCollector(Collector):
    def __init__(self, attempt):
        self.calls = []

    @collects(LossRecord)
    def add_loss(self, rank, record):
        self.calls.append(("loss", rank.number, record.step))

    @collects_per_module(JoinRecord)
    def add_join(self, rank, module, record):
        self.calls.append(("join", rank.number, module))

    def begin_rank(self, rank):
        self.calls.append(("begin", rank.number))

    def end_rank(self, rank):
        self.calls.append(("end_rank", rank.number))

    def end(self, attempt):
        self.calls.append(("end", attempt.session))
"""


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type]:
    folder = tmp_path / PACKAGE
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "collector.py").write_text(SOURCE)
    monkeypatch.setattr(analysis, "__path__", [*analysis.__path__, str(tmp_path)])
    subscriptions.cache_clear()
    (cls,) = [cls for cls in subscriptions() if cls.__module__ == f"ddpcheck.analysis.{PACKAGE}.collector"]
    yield cls
    subscriptions.cache_clear()


def test_a_new_collector_needs_no_list(added: type) -> None:
    attempt = Attempt("a")
    records: list[Record] = [
        HEADER,
        JoinRecord(0, 0),
        ModuleRecord(0, "Net", [0, 3], 0, [], []),
        JoinRecord(0, 0),
        LossRecord(0, 5, [1.0]),
        EndRecord("exit", 2.0),
    ]
    for record in records:
        attempt.feed(HEADER, record)
    attempt.end()
    # The first join is skipped: the rank had not described its module yet.
    assert attempt.collector(added).calls == [  # type: ignore[attr-defined]
        ("begin", 3),
        ("join", 3, ((0, 3), 0)),
        ("loss", 3, 5),
        ("end_rank", 3),
        ("end", "a"),
    ]


def test_every_kind_but_the_header_is_collected() -> None:
    collected = {each.record for methods in subscriptions().values() for each in methods}
    # The first line of a part is read by the file itself.
    assert collected == set(record_kinds().values()) - {RankHeader, PartRecord}


def test_records_with_a_module_are_collected_per_module() -> None:
    for methods in subscriptions().values():
        for each in methods:
            if each.per_module:
                assert "module" in each.record.__dataclass_fields__
    assert any(each.record is DigestRecord and each.per_module for each in sum(subscriptions().values(), ()))
