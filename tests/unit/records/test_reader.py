"""Reads files that are truncated, damaged, very large or still growing."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ddpcheck.records import reader
from ddpcheck.records.kinds.modules import JoinRecord
from ddpcheck.records.kinds.rank import EndRecord, RankHeader
from ddpcheck.records.reader import RecordFile, parse
from ddpcheck.records.registry import Record, record_kinds, to_line

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = sorted({name for kind in record_kinds().values() for name in kind.__dataclass_fields__})


def line(step: int) -> bytes:
    return to_line(JoinRecord(0, step))


def read_all(file: RecordFile) -> list[Record]:
    records: list[Record] = []
    while more := file.read():
        records += more
    return records


@given(st.binary(max_size=200))
@example(b"[" * 100_000)
@example(b'{"kind":' * 50_000)
@example(b"1" * 10_000)
@example(b"\xff\xfe{}")
@example(b'{"kind":"end","reason":"\\ud800","time":NaN}')
def test_parse_accepts_any_bytes(data: bytes) -> None:
    parse(data)


@settings(max_examples=50)
@given(JSON)
def test_parse_accepts_any_json(value: object) -> None:
    assert parse(json.dumps(value).encode()) is None


@settings(max_examples=50)
@given(st.sampled_from(sorted(record_kinds())), st.dictionaries(st.sampled_from(FIELDS), JSON))
def test_parse_accepts_any_fields_of_any_kind(kind: str, values: dict[str, object]) -> None:
    record = parse(json.dumps({**values, "kind": kind}).encode())
    assert record is None or parse(to_line(record)) is not None


def test_growing_file(tmp_path: Path) -> None:
    path = tmp_path / "rank.jsonl"
    file = RecordFile(path)
    assert file.read() == []
    path.write_bytes(line(0) + line(1)[:9])
    assert file.read() == [JoinRecord(0, 0)]
    assert file.read() == []
    assert file.torn
    with path.open("ab") as more:
        more.write(line(1)[9:] + line(2))
    assert file.read() == [JoinRecord(0, 1), JoinRecord(0, 2)]
    assert not file.torn
    assert file.bad == 0


def test_number_of_lines_per_read_is_limited(tmp_path: Path) -> None:
    path = tmp_path / "rank.jsonl"
    path.write_bytes(b"".join(map(line, range(10))))
    file = RecordFile(path)
    assert [len(file.read(4)) for _ in range(4)] == [4, 4, 2, 0]


def test_bad_lines_are_counted_and_skipped(tmp_path: Path) -> None:
    path = tmp_path / "rank.jsonl"
    bad = [
        b"\0\0\0\n",
        b"{\n",
        b"[]\n",
        b'{"kind":"new"}\n',
        b'{"kind":"join","module":"0","step":0}\n',
        b"\xff\n",
    ]
    path.write_bytes(line(0) + b"".join(bad) + b"\n\n" + line(1))
    file = RecordFile(path)
    assert read_all(file) == [JoinRecord(0, 0), JoinRecord(0, 1)]
    assert file.bad == len(bad)


def test_many_bad_lines_do_not_end_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rank.jsonl"
    path.write_bytes(b"garbage\n" * 5000 + line(7))
    assert read_all(RecordFile(path)) == [JoinRecord(0, 7)]


def test_record_larger_than_a_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "CHUNK", 10)
    path = tmp_path / "rank.jsonl"
    big = EndRecord("exit", 1.0, error="x" * 20_000)
    path.write_bytes(line(0) + to_line(big) + line(1))
    assert read_all(RecordFile(path)) == [JoinRecord(0, 0), big, JoinRecord(0, 1)]


def test_overlong_line_is_not_buffered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash of the machine can leave a file that ends in gigabytes of zeros."""
    monkeypatch.setattr(reader, "LONGEST_LINE", 1 << 16)
    monkeypatch.setattr(reader, "CHUNK", 1 << 12)
    path = tmp_path / "rank.jsonl"
    with path.open("wb") as file:
        file.write(line(0))
        file.truncate(16 << 20)
        file.seek(0, 2)
        file.write(b"\n" + line(1))
    tracemalloc.start()
    reading = RecordFile(path)
    records = read_all(reading)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert records == [JoinRecord(0, 0), JoinRecord(0, 1)]
    assert reading.bad == 1
    assert peak < 1 << 20


def test_deleted_file_has_no_more_records(tmp_path: Path) -> None:
    path = tmp_path / "rank.jsonl"
    path.write_bytes(line(0))
    file = RecordFile(path)
    assert len(file.read()) == 1
    path.unlink()
    assert file.read() == []


@pytest.mark.parametrize(("rank", "world_size"), [(0, 10**12), (2, 2), (-1, 2), (0, 0)])
def test_a_header_that_no_job_can_have_is_not_read(rank: int, world_size: int) -> None:
    """A list of all ranks of such a job would fill the memory."""
    header = RankHeader(rank, world_size, "node0", 7, 1, "session", 1.0)
    assert parse(to_line(header).rstrip()) is None
    assert parse(to_line(replace(header, rank=0, world_size=2)).rstrip()) is not None
