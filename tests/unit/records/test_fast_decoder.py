"""The fast decoder returns the same records as the general decoder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpcheck.records import reader
from ddpcheck.records.kinds.modules import JoinRecord
from ddpcheck.records.kinds.rank import EndRecord
from ddpcheck.records.reader import _parse_any, parse
from ddpcheck.records.registry import from_mapping, record_kinds, to_line
from tests.helpers.paths import ROOT

decode = reader._fast_decoder()
STORED = sorted((ROOT / "tests" / "stored_runs").glob("*/rank-*.jsonl"))
VALUES = st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-2, 2) | st.text("ab", max_size=3)
NESTED = (
    VALUES | st.lists(VALUES, max_size=2) | st.dictionaries(st.text("ab", max_size=2), VALUES, max_size=2)
)


@pytest.mark.parametrize("path", STORED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_stored_lines(path: Path) -> None:
    for line in path.read_bytes().splitlines():
        fast = decode(line)
        assert fast is None or fast == _parse_any(line)


def test_fast_decoder_supports_all_stored_lines() -> None:
    lines = [
        line for path in STORED if path.parent.name == "1-sound" for line in path.read_bytes().splitlines()
    ]
    assert lines
    assert all(decode(line) is not None for line in lines)


@settings(max_examples=300)
@given(st.sampled_from(sorted(record_kinds())), st.data())
def test_fast_decoder_agrees_with_the_general_decoder(kind: str, data: st.DataObject) -> None:
    names = sorted(record_kinds()[kind].__dataclass_fields__)
    raw = {name: data.draw(NESTED) for name in names}
    line = json.dumps({"kind": kind, **raw}, separators=(",", ":")).encode()
    fast = decode(line)
    if fast is not None:
        assert fast == _parse_any(line)


@pytest.mark.parametrize(
    "line",
    [
        b'{"kind":"end","reason":"x","time":NaN}',
        b' {"kind":"join","module":0,"step":1}',
        b'{"step":1,"module":0,"kind":"join"}',
    ],
)
def test_unusual_lines_use_the_general_decoder(line: bytes) -> None:
    assert decode(line) is None
    assert parse(line) is not None


def test_lines_are_decoded_without_msgspec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "msgspec", None)
    reader._fast_decoder.cache_clear()
    try:
        assert parse(to_line(JoinRecord(0, 1))) == JoinRecord(0, 1)
        assert reader._fast_decoder()(to_line(JoinRecord(0, 1))) is None
    finally:
        reader._fast_decoder.cache_clear()


def test_record_with_empty_values() -> None:
    record = from_mapping({"kind": "end", "reason": "", "time": 0})
    assert isinstance(record, EndRecord)
    assert parse(to_line(record)) == record
