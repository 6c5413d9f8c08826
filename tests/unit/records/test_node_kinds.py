"""Records of node logs are decoded leniently."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddpcheck.records.node_kinds import (
    GpuSampleEntry,
    HardwareRecord,
    NodeLogReader,
    NodeRecord,
    RankExitRecord,
    SampleRecord,
    SamplerEndRecord,
    StopRecord,
    decode,
    from_mapping,
)


def line(**fields: object) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b'{"kind":"sample"}',
        b'{"kind":"sample","time":"x"}',
        b'{"kind":"new","time":1}',
    ],
)
def test_invalid_lines(raw: bytes) -> None:
    assert decode(raw) is None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"cpu": "x", "memory": 2.5}, SampleRecord(1.0)),
        ({"memory": -1, "pid": True}, SampleRecord(1.0)),
        ({"memory": 1 << 70}, SampleRecord(1.0)),
        ({"from_a_newer_version": 1, "cpu": 3}, SampleRecord(1.0, cpu=3.0)),
        (
            {"interfaces": {"lo": [1, "x"], "eth0": [1, 2]}, "ranks": 3},
            SampleRecord(1.0, interfaces={"eth0": [1, 2]}),
        ),
        (
            {"gpus": [3, {"busy": "x", "clock": 7, "processes": {"8": None, "9": 4}}]},
            SampleRecord(1.0, gpus=[GpuSampleEntry(clock=7, processes={"8": None, "9": 4})]),
        ),
    ],
)
def test_a_field_of_the_wrong_type_takes_its_default(fields: dict[str, object], expected: NodeRecord) -> None:
    assert decode(line(kind="sample", time=1, **fields)) == expected
    assert from_mapping({"kind": "sample", "time": 1, **fields}) == expected


def test_non_finite_numbers_are_accepted() -> None:
    record = decode(b'{"kind":"sample","time":1,"cpu":NaN,"memory":5}')
    assert isinstance(record, SampleRecord)
    assert record.memory == 5


def test_fields_in_another_order_and_with_spaces() -> None:
    assert decode(b'{"time": 2, "kind": "stop"}') == StopRecord(2.0)


def test_nested_records() -> None:
    raw = {"kind": "hardware", "interfaces": [{"name": "lo", "class": "loopback"}, 3], "nvml": {"gpus": "x"}}
    record = from_mapping(raw)
    assert isinstance(record, HardwareRecord)
    assert [(each.name, each.type) for each in record.interfaces] == [("lo", "loopback")]
    assert record.nvml.gpus == []


def test_a_reader_gives_hosts_and_counts_skipped_lines(tmp_path: Path) -> None:
    exits = line(kind="rank_exit", pid=3, host="b", time=1)
    (tmp_path / "node-a_b.jsonl").write_bytes(
        b"\n".join([line(kind="node", host="a/b"), line(kind="sampled", cpu_seconds=2), exits, b"{torn", b""])
    )
    (tmp_path / "node-c.jsonl").write_bytes(
        line(kind="sampled") + b"\n" + line(kind="from_a_newer_version") + b"\n"
    )
    reader = NodeLogReader(tmp_path)
    assert list(reader.read([SamplerEndRecord])) == [
        ("a/b", SamplerEndRecord(cpu_seconds=2.0)),
        ("c", SamplerEndRecord()),
    ]
    assert reader.skipped == 1
    assert [record for _, record in NodeLogReader(tmp_path).read([RankExitRecord])] == [
        RankExitRecord(3, "b", 1.0)
    ]
