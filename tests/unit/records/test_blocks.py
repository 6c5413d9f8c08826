"""Blocks hold records exactly, in their order, in one line; damaged ones are recognised."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpcheck.probes.sketches.sketch import Sketch
from ddpcheck.records import blocks
from ddpcheck.records.blocks import Block, BlockBuilder, Encoding, is_block
from ddpcheck.records.codecs import pack, unwrap
from ddpcheck.records.kinds.data import BatchRecord
from ddpcheck.records.kinds.digests import DigestRecord
from ddpcheck.records.kinds.gradients import AppliedRecord, BackwardRecord
from ddpcheck.records.kinds.memory import MemoryRecord
from ddpcheck.records.kinds.modules import HyperRecord, JoinRecord, LossRecord
from ddpcheck.records.kinds.timing import ClockRecord, CostRecord
from ddpcheck.records.reader import RecordFile
from ddpcheck.records.registry import Record, to_line, to_mapping
from tests.helpers.paths import ROOT


def root_of(*what: object, size: int = 16) -> str:
    return hashlib.blake2b(repr(what).encode(), digest_size=size).hexdigest()


def step_records(step: int, parameters: int = 10) -> list[Record]:
    """What a rank writes at a step."""
    draw = random.Random(step)
    sketches = pack(Sketch(draw.gauss(0, 1e-3), 2e-3 * draw.random(), 0, 0) for _ in range(parameters))
    leaves = base64.b64encode(draw.randbytes(2 * parameters)).decode()
    time = 1_769_854_500 + step * 0.05
    timed = time if step % 4 == 0 else 0.0
    records: list[Record] = [
        BackwardRecord(
            number=step + 1,
            step=step,
            local=sketches,
            reduced=sketches[:25],
            root=root_of(step)[:16],
            time=timed,
        ),
        AppliedRecord(step=step, root=root_of(step)),
        DigestRecord(
            0,
            "params",
            step,
            root_of("p", step),
            leaves,
            2,
            time=round(time, 4),
            optimizer=0,
            forward=step + 1,
        ),
        BatchRecord(forward=step, digest=root_of("b", step, size=6), rows=32),
        HyperRecord(0, step, {"0.lr": 0.1 / (step + 1)}),
    ]
    if step % 8 == 7:
        records.append(ClockRecord(step - 7, total=[draw.randrange(50_000) for _ in range(8)]))
        records.append(LossRecord(0, step - 7, [2.5, None, "nan", *(draw.random() for _ in range(5))]))
    if step % 5 == 0:
        records.append(MemoryRecord(step, host=draw.randrange(1 << 40), high=step << 33))
    return records


def block_of(records: list[Record]) -> bytes:
    builder = BlockBuilder()
    assert all(map(builder.add, records))
    return builder.line()


def read(path: Path) -> tuple[list[Record], int]:
    file = RecordFile(path)
    records: list[Record] = []
    while more := file.read():
        records += more
    return records, file.bad


def plain(records: list[Record]) -> list[dict[str, Any]]:
    return list(map(to_mapping, records))


@pytest.mark.parametrize("steps", [1, 2, 3, 40, 100])
def test_records_come_back_exactly_and_in_order(tmp_path: Path, steps: int) -> None:
    records = [record for step in range(steps) for record in step_records(step)]
    path = tmp_path / "rank-00000.jsonl"
    path.write_bytes(block_of(records))
    found, bad = read(path)
    assert bad == 0
    assert plain(found) == plain(records)
    assert [type(record) for record in found] == [type(record) for record in records]
    assert [type(value) for value in plain(found)[0].values()] == [
        type(v) for v in plain(records)[0].values()
    ]


TEXTS = (
    st.text(max_size=6)
    | st.binary(max_size=6).map(bytes.hex)
    | st.sampled_from(["", "AA==", "AB==", "zzzzz", "00"])
)
NUMBERS = st.integers(-(2**70), 2**70) | st.integers(-300, 300)


ROWS = st.tuples(TEXTS, TEXTS, NUMBERS, st.floats(allow_nan=False), NUMBERS | st.none())


@settings(max_examples=300)
@given(st.lists(ROWS, min_size=1, max_size=6))
def test_any_values_come_back_exactly(rows: list[tuple[str, str, int, float, int | None]]) -> None:
    records: list[Record] = [
        DigestRecord(
            0, "params", 3, root, leaves, 2, of=leaves, time=time, optimizer=optimizer, forward=number
        )
        for root, leaves, number, time, optimizer in rows
    ]
    records += [
        BackwardRecord(
            number=number, step=abs(number), local=root, reduced=leaves, root=root, absent=[abs(number)]
        )
        for root, leaves, number, *_ in rows
    ]
    line = block_of(records)
    file = blocks.decode(line[:-1], lambda *_: True)
    assert plain(list(file.records())) == plain(records)


def test_floats_keep_all_their_bits() -> None:
    times = [0.0, 0.1, 1 / 3, -0.0, 1e300, 1_769_854_500.1234]
    records: list[Record] = [replace(step_records(0)[2], time=time) for time in times]  # type: ignore[type-var]
    found = list(blocks.decode(block_of(records)[:-1], lambda *_: True).records())
    assert [record.time.hex() for record in found] == [time.hex() for time in times]  # type: ignore[attr-defined]


def test_a_block_is_one_line_between_lines_of_json(tmp_path: Path) -> None:
    events = [JoinRecord(0, 0), JoinRecord(0, 1)]
    inside = [record for step in range(300) for record in step_records(step)]
    line = block_of(inside)
    assert is_block(line)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert b"\r" not in line
    path = tmp_path / "rank-00000.jsonl"
    path.write_bytes(to_line(events[0]) + line + to_line(events[1]))
    found, bad = read(path)
    assert bad == 0
    assert plain(found) == plain([events[0], *inside, events[1]])
    assert [json.loads(each) for each in path.read_bytes().splitlines() if each.startswith(b"{")] == plain(
        list(events)
    )


def test_sketches_are_bytes_that_unwrap_accepts(tmp_path: Path) -> None:
    records = [record for step in range(4) for record in step_records(step)]
    (tmp_path / "rank-00000.jsonl").write_bytes(block_of(records))
    found, _ = read(tmp_path / "rank-00000.jsonl")
    pairs = [
        (one, other)
        for one, other in zip(records, found, strict=True)
        if isinstance(one, BackwardRecord) and isinstance(other, BackwardRecord)
    ]
    assert pairs
    for one, other in pairs:
        assert isinstance(other.local, bytes)
        assert unwrap(other.local) == unwrap(one.local)


def test_columns_of_step_records_are_compact() -> None:
    """Numbers that count are ranges, texts are bytes: a column of JSON would be several times as large."""
    records = [record for step in range(64) for record in step_records(step)]
    block = blocks.decode(block_of(records)[:-1], lambda *_: True)
    found = {
        (table.record.kind, name): column.encoding
        for table in block.tables
        if table is not None
        for name, column in table.columns.items()
    }
    assert (
        found["backward", "number"] is found["digest", "step"] is found["batch", "forward"] is Encoding.RANGE
    )
    assert found["backward", "local"] is found["backward", "reduced"] is Encoding.SKETCHES
    assert found["digest", "leaves"] is Encoding.BASE64
    assert found["digest", "root"] is found["applied", "root"] is found["batch", "digest"] is Encoding.HEX
    assert found["digest", "time"] is Encoding.DECIMAL
    assert found["memory", "host"] is Encoding.DELTA
    step_kinds = ("backward", "applied", "digest", "batch")
    rows = [record for record in records if record.kind in step_kinds]
    assert 3 * len(block_of(rows)) < sum(len(to_line(record)) for record in rows)


def test_a_single_record_of_a_table() -> None:
    records = [record for step in range(20) for record in step_records(step)]
    for table in blocks.decode(block_of(records)[:-1], lambda *_: True).tables:
        assert table is not None
        assert [table.record_at(row) for row in range(table.rows)] == table.records()


def test_records_that_are_no_rows_are_refused() -> None:
    builder = BlockBuilder()
    assert not builder.add(JoinRecord(0, 0))
    # Wrapping comes once.
    assert not builder.add(DigestRecord(0, "init.after", -1, root_of(0), "", 8))
    assert len(builder) == 0


def test_a_torn_block_is_read_when_it_is_complete(tmp_path: Path) -> None:
    records = [record for step in range(10) for record in step_records(step)]
    line = block_of(records)
    path = tmp_path / "rank-00000.jsonl"
    path.write_bytes(to_line(JoinRecord(0, 0)) + line[: len(line) // 2])
    file = RecordFile(path)
    assert file.read() == [JoinRecord(0, 0)]
    assert file.read() == []
    assert file.torn
    with path.open("ab") as more:
        more.write(line[len(line) // 2 :])
    assert plain(file.read()) == plain(records)
    assert (file.torn, file.bad) == (False, 0)


def test_every_damaged_byte_is_noticed(tmp_path: Path) -> None:
    records = [record for step in range(2) for record in step_records(step)]
    line = block_of(records)
    path = tmp_path / "rank-00000.jsonl"
    for position in range(len(line) - 1):
        damaged = bytearray(line)
        damaged[position] ^= 1 + position % 255
        path.write_bytes(bytes(damaged) + to_line(JoinRecord(0, 7)))
        found, bad = read(path)
        # A newline in the middle makes two damaged lines of it.
        assert bad in (1, 2), position
        assert found == [JoinRecord(0, 7)], position


def sealed(header: object, data: bytes = b"") -> bytes:
    """A block with a valid checksum and any content."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    packer = zlib.compressobj(9, zdict=blocks._DICTIONARY)
    deflated = packer.compress(text + b"\n" + data) + packer.flush()
    content = len(deflated).to_bytes(4, "little") + deflated
    return (
        blocks.MARK
        + blocks.VERSION
        + blocks._escaped(zlib.crc32(content).to_bytes(4, "little") + content)
        + b"\n"
    )


ROW = {"module": 0, "step": 1}
UNREADABLE: list[bytes] = [
    blocks.MARK + b"\n",
    blocks.MARK + b"1\n",
    blocks.MARK + b"2abcdefgh\n",
    sealed(b"[" * 100_000),
    sealed([]),
    sealed({"order": [0, 1]}),
    sealed({"order": [0, 9], "tables": []}),
    sealed({"order": [-1, 1], "tables": []}, b"\0"),
    sealed({"order": [0, 1], "tables": []}, b"\0"),
    sealed({"order": [0, 1], "tables": [["memory", 2, {"step": 1}, []]]}, b"\0"),
    sealed({"order": [0, 1], "tables": [["memory", 1, {"step": "1"}, []]]}, b"\0"),
    sealed({"order": [0, 1], "tables": [["memory", 1, {}, []]]}, b"\0"),
    sealed({"order": [0, 2], "tables": [["memory", 2, {}, [["step", "range", [1], []]]]]}, b"\0\0"),
    sealed({"order": [0, 2], "tables": [["memory", 2, {}, [["step", "range", ["1", 1], []]]]]}, b"\0\0"),
    sealed({"order": [0, 2], "tables": [["memory", 2, {}, [["step", "hex", 1, [[0, 2]]]]]]}, b"\0\0"),
    sealed(
        {"order": [0, 2], "tables": [["memory", 2, {}, [["step", "json", None, [[2, 6]]]]]]}, b'\0\0[1,"a"]'
    ),
    sealed({"order": [0, 2], "tables": [["memory", 2, {}, [["step", "json", None, [[2, 3]]]]]]}, b"\0\0[1]"),
    sealed({"order": [0, 2], "tables": [["memory", 2, {}, [["step", "delta", [0, 8], [[0, 9]]]]]]}, b"\0\0"),
    sealed({"order": [0, 2], "tables": [["memory", 2, {}, [["step", "delta", [0, 3], [[0, 2]]]]]]}, b"\0\0"),
    sealed({"order": [0, 2], "tables": [["memory", 2, {}, [["step", "new", None, []]]]]}, b"\0\0"),
    sealed({"order": [0, 70_000], "tables": [["memory", 70_000, {"step": 1}, []]]}, bytes(70_000)),
]


@pytest.mark.parametrize("line", UNREADABLE, ids=range(len(UNREADABLE)))
def test_content_that_no_rank_writes_is_one_bad_line(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "rank-00000.jsonl"
    path.write_bytes(line + to_line(JoinRecord(0, 7)))
    assert read(path) == ([JoinRecord(0, 7)], 1)


def test_a_block_that_inflates_without_end_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "MOST_BYTES", 1 << 16)
    path = tmp_path / "rank-00000.jsonl"
    path.write_bytes(sealed({"order": [0, 0], "tables": []}, bytes(1 << 20)) + to_line(JoinRecord(0, 7)))
    assert read(path) == ([JoinRecord(0, 7)], 1)


def test_kinds_and_fields_of_newer_versions_are_skipped(tmp_path: Path) -> None:
    tables = [
        ["from the future", 2, {"what": 1}, [["how", "range", [0, 1], []]]],
        ["memory", 1, {"step": 4, "color": "blue"}, [["shape", "hex", 1, [[0, 1]]]]],
    ]
    path = tmp_path / "rank-00000.jsonl"
    path.write_bytes(sealed({"order": [0, 3], "tables": tables}, b"\0\1\0"))
    assert read(path) == ([MemoryRecord(4)], 1)


def test_an_older_reader_sees_one_unknown_line(tmp_path: Path) -> None:
    """A version of ddpcheck that knows no blocks counts a block as one damaged line and reads the rest."""
    line = block_of([record for step in range(20) for record in step_records(step)])
    with pytest.raises(ValueError):  # noqa: PT011
        json.loads(line)
    assert len(line.splitlines()) == 1


def test_blocks_of_a_stored_run_have_all_its_records() -> None:
    """The same records as in the run of version 1 that it was made from."""
    for number in range(3):
        old, _ = read(ROOT / f"tests/stored_runs/1-learning-rate/rank-{number:05d}.jsonl")
        new, bad = read(ROOT / f"tests/stored_runs/2-learning-rate/rank-{number:05d}.jsonl")
        assert bad == 0
        assert plain(new)[1:] == plain(old)[1:]
        file = RecordFile(ROOT / f"tests/stored_runs/2-learning-rate/rank-{number:05d}.jsonl")
        assert any(isinstance(item, Block) for item in file.read_items())


def test_cost_records_are_rows() -> None:
    assert BlockBuilder().add(CostRecord(0, 64, 1000, {"parameters": 3}))
