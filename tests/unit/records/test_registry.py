"""Records are registered by kind, and are equal after encoding and decoding."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from pathlib import Path
from typing import get_origin, get_type_hints

import pytest

from ddpcheck.records import kinds, registry
from ddpcheck.records.kinds.digests import CaptureRecord, DetailRecord, DigestRecord
from ddpcheck.records.kinds.modules import (
    CommHookRecord,
    HyperRecord,
    JoinRecord,
    ModuleRecord,
    OptimizerRecord,
    SkipRecord,
    StructureRecord,
)
from ddpcheck.records.kinds.rank import EndRecord, FaultRecord, RankHeader
from ddpcheck.records.reader import parse
from ddpcheck.records.registry import SCHEMA, Record, from_mapping, record, record_kinds, to_line

END = EndRecord("exit", 9.25)
LISTED: list[Record] = [
    RankHeader(0, 2, "node0", 7, 99, "a1", 1.5),
    ModuleRecord(0, "Net", [0, 1], 0, [["w", "float32", [2, 3], 1]], []),
    DigestRecord(0, "params", 3, "ab" * 16, "AAAA", 2),
    OptimizerRecord(0, "SGD", 0, [[0, 1], [-1]]),
    HyperRecord(0, 4, {"0.lr": 0.1, "0.betas": [0.9, 0.99], "0.foreach": None, "0.nesterov": False}),
    SkipRecord(None, None, 3, 4),
    StructureRecord(0, "added", "head.weight", 1, 2),
    JoinRecord(0, 0),
    CommHookRecord(0, "fp16_compress_hook", 2),
    DetailRecord(0, "params", 3, "parameters", None, "AAAA", 8, "AA=="),
    CaptureRecord(0, "params", 3, "parameters", 0, "captures/x.safetensors", [0]),
    FaultRecord("parameters", "after_step", "ValueError: no", "x.py:3"),
    END,
]


def smallest(kind: type[Record]) -> Record:
    """A record with only its required fields."""
    values = {int: 3, float: 2.5, str: "x", bool: True}
    hints = get_type_hints(kind)
    needed = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]
    return kind(
        **{name: values.get(hints[name], (get_origin(hints[name]) or type(None))()) for name in needed}
    )


SMALLEST = LISTED + [smallest(kind) for kind in record_kinds().values() if kind not in map(type, LISTED)]
FULL: list[Record] = [
    RankHeader(
        3,
        8,
        "näme",
        7,
        99,
        "a1",
        1.5,
        3,
        2,
        "3.12.1",
        "2.13",
        "gloo",
        "cuda:0",
        "xxh3",
        ["a\udcff"],
        {"A": "b"},
    ),
    ModuleRecord(1, "Net", [1], 2, [], [["b", "int64", [], 0]], ["x"], {"static_graph": True}),
    DigestRecord(0, "buffers", 3, "ab" * 16, "AAAA", 1, "buffers", 7.25, 1, 4, "c0ffee00"),
    SkipRecord(0, 1, 3, 4, 65536.0),
    CaptureRecord(0, "params", 3, "parameters", 0, "captures/x.safetensors", [0], [1]),
    FaultRecord("parameters", "after_step", "ValueError: \n line", "x.py:3", 77),
    EndRecord("raised", 9.25, "KeyError: 'x'", "train.py:9", 12),
]


@pytest.mark.parametrize("record", SMALLEST + FULL, ids=lambda record: record.kind)
def test_a_decoded_record_is_equal(record: Record) -> None:
    line = to_line(record)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert parse(line) == record


def test_every_kind_is_tested() -> None:
    assert {type(record) for record in SMALLEST} == set(record_kinds().values())
    assert len(SMALLEST) == len(record_kinds())


@pytest.mark.parametrize("record", SMALLEST, ids=lambda record: record.kind)
def test_fields_at_their_default_are_not_written(record: Record) -> None:
    needed = {f.name for f in fields(record) if f.default is MISSING and f.default_factory is MISSING}
    always_written = {"schema"} if isinstance(record, RankHeader) else set()
    # Lists and dicts have a default factory and no default value to compare with.
    containers = {f.name for f in fields(record) if f.default_factory is not MISSING}
    written = json.loads(to_line(record)).keys() - {"kind"} - containers
    assert written == needed | always_written


@pytest.mark.parametrize("record", SMALLEST, ids=lambda record: record.kind)
def test_unknown_fields_are_ignored(record: Record) -> None:
    raw = {**json.loads(to_line(record)), "from_a_newer_version": {"x": 1}}
    assert parse(json.dumps(raw).encode()) == record


@pytest.mark.parametrize("record", SMALLEST, ids=lambda record: record.kind)
def test_missing_required_field(record: Record) -> None:
    complete = json.loads(to_line(record))
    for name in (f.name for f in fields(record) if f.default is MISSING and f.default_factory is MISSING):
        assert from_mapping({key: value for key, value in complete.items() if key != name}) is None


@pytest.mark.parametrize("kind", ["", "gradient_sketch", None, 3, ["rank"]])
def test_unknown_kind(kind: object) -> None:
    assert from_mapping({**json.loads(to_line(LISTED[0])), "kind": kind}) is None


@pytest.mark.parametrize("schema", [SCHEMA, SCHEMA + 1, 1])
def test_other_schema_versions_are_accepted(schema: int) -> None:
    raw = {**json.loads(to_line(LISTED[0])), "schema": schema, "cluster": "x"}
    header = parse(json.dumps(raw).encode())
    assert isinstance(header, RankHeader)
    assert header.schema == schema


@pytest.mark.parametrize(
    ("record", "field", "wrong"),
    [
        (LISTED[0], "rank", "0"),
        (LISTED[0], "rank", True),
        (LISTED[0], "rank", 1.0),
        (LISTED[0], "local_rank", "0"),
        (LISTED[0], "environment", {"A": 1}),
        (LISTED[0], "argv", "train.py"),
        (LISTED[1], "group", [0, "1"]),
        (LISTED[1], "parameters", ["w"]),
        (LISTED[1], "parameters", {"w": 1}),
        (LISTED[2], "leaves", None),
        (LISTED[2], "time", "now"),
        (LISTED[2], "optimizer", [0]),
        (LISTED[3], "groups", [0]),
        (LISTED[4], "changed", []),
        (END, "time", False),
    ],
)
def test_field_of_the_wrong_type(record: Record, field: str, wrong: object) -> None:
    raw = json.loads(to_line(record))
    assert parse(json.dumps({**raw, field: wrong}).encode()) is None


def test_integer_is_accepted_as_float() -> None:
    raw = {**json.loads(to_line(END)), "time": 9}
    assert parse(json.dumps(raw).encode()) == EndRecord("exit", 9)


def test_a_module_of_the_package_adds_its_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "added_by_a_test.py").write_text(
        "from dataclasses import dataclass\n"
        "from ddpcheck.records.registry import Record, record\n\n"
        "@record('added_by_a_test')\n"
        "@dataclass(frozen=True)\n"
        "class AddedRecord(Record):\n"
        "    step: int\n"
    )
    monkeypatch.setattr(kinds, "__path__", [*kinds.__path__, str(tmp_path)])
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    record_kinds.cache_clear()
    try:
        added = record_kinds()["added_by_a_test"]
    finally:
        record_kinds.cache_clear()
    assert json.loads(to_line(added(3))) == {"kind": "added_by_a_test", "step": 3}  # type: ignore[call-arg]


def test_a_kind_has_one_class() -> None:
    with pytest.raises(ValueError, match="'end'"):
        record("end")(JoinRecord)
