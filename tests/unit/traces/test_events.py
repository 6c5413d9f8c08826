"""Events are complete and in order, for any chunk size and file layout."""

from __future__ import annotations

import gzip
import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpcheck.errors import TraceUnreadable
from ddpcheck.traces.build import EventFilter
from ddpcheck.traces.events import EventPrefilter, EventReader, nanoseconds

NOTHING_DROPPED = EventPrefilter([])


def read(
    text: bytes, window: int = 64, prefilter: EventPrefilter = NOTHING_DROPPED
) -> tuple[list[Any], dict[str, Any]]:
    reader = EventReader(io.BytesIO(text), "the file", prefilter, window)
    names = [event.name for events in reader for event in events]
    return names, reader.facts


def document(names: list[str], **around: Any) -> dict[str, Any]:
    nasty: list[Any] = [{"x": [{"y": 1}, {"y": "}, {"}]}, {"z": '"},\n  {"'}, [], None]
    events = [
        {"ph": "X", "name": name, "ts": number, "args": nasty[number % 4]}
        for number, name in enumerate(names)
    ]
    return {"before": [{"a": 1}, {"b": 2}], "traceEvents": events, "after": [{"a": 1}, {"b": 2}], **around}


texts = st.text(alphabet='ab"\\{}[],: \n\u2603', max_size=12)


@given(st.lists(texts, max_size=20), st.sampled_from([None, 1, 2]), st.sampled_from([1, 7, 64, 1000, 10**6]))
def test_chunks_may_cut_anywhere(names: list[str], indent: int | None, window: int) -> None:
    text = json.dumps(document(names, baseTimeNanoseconds=5), indent=indent).encode()
    names_read, facts = read(text, window)
    assert names_read == names
    assert facts == {"base_time_nanoseconds": 5}


def test_facts_before_and_after() -> None:
    text = b'{"distributedInfo": {"rank": 3}, "traceEvents": [{"name": "a"}], "baseTimeNanoseconds": 7}'
    assert read(text) == (["a"], {"distributed_info": {"rank": 3}, "base_time_nanoseconds": 7})


def test_much_before_the_events_is_read_once() -> None:
    text = b'{"lines": [%s], "traceEvents": [{"name": "a"}]}' % b",".join([b'"line"'] * 300_000)
    for window in (16, 1000):
        assert read(text, window)[0] == ["a"]


@pytest.mark.parametrize("text", [b'[{"name": "a"}, {"name": "b"}]', b'\n [{"name": "a"},\n{"name": "b"}]\n'])
def test_a_bare_list(text: bytes) -> None:
    assert read(text)[0] == ["a", "b"]


def test_no_events() -> None:
    assert read(b'{"traceEvents": []}') == ([], {})


@pytest.mark.parametrize("window", [16, 1000])
def test_names_that_are_not_text(window: int) -> None:
    text = b'{"traceEvents": [{"name": "a"}, {"name": "\xff"}, {"name": "b"}, {"name": "c\xff"}]}'
    assert read(text, window)[0] == ["a", "\ufffd", "b", "c\ufffd"]


def test_known_errors_of_profilers() -> None:
    text = (
        b'{"traceEvents": [{"name": "a", "args": {"bandwidth": inf}}, {"name": "b", "args": {"x": [nan, -inf]}},'
        b' {"name": "c\xff"}, {"name": "d", "dur": Infinity}]}'
    )
    for window in (40, 1000):
        assert read(text, window)[0] == ["a", "b", "c\ufffd", "d"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "does not begin like JSON"),
        (b"\x00\x01\x02", "does not begin like JSON"),
        (b"<html>", "does not begin like JSON"),
        (b'{"loss": [1, 2]}', "no traceEvents"),
        (b'{"loss": [1, ', "not a trace, or cut off before its first event"),
        (b'{"traceEvents": [1, 2, 3]}', "are not events"),
        (b'{"traceEvents": [{"name": "a"}, {"na', "is cut off"),
        (b'{"traceEvents": [{"name": "a"}, {"name": "b"}', "is cut off"),
        (b'{"traceEvents": [{"name": "a"},,{"name": "b"}]}', "not valid JSON"),
    ],
)
@pytest.mark.parametrize("window", [16, 10**6])
def test_no_trace(text: bytes, message: str, window: int) -> None:
    with pytest.raises(TraceUnreadable, match=message) as raised:
        read(text, window)
    assert str(raised.value).startswith("the file ")


def test_compressed_data_that_ends_too_early() -> None:
    compressed = gzip.compress(json.dumps(document(["name"] * 500)).encode(), mtime=0)
    reader = EventReader(gzip.GzipFile(fileobj=io.BytesIO(compressed[:-20])), "the file", NOTHING_DROPPED)  # type: ignore[arg-type]
    with pytest.raises(TraceUnreadable, match="compressed data ends too early"):
        list(reader)


OLDER = """
  {
    "ph": "X", "cat": "%s", "name": "%s", "pid": 1, "tid": 2,
    "ts": 1.500, "dur": 2.000,
    "args": {
      "External id": 1
    }
  }"""
NEWER = OLDER.replace(', "', ',\n    "').replace("    },", "    }")
NAMES = [
    ("cpu_op", "aten::mm"),
    ("kernel", "gemm"),
    ("cpu_op", "c10d::allreduce_"),
    ("python_function", "train.py(3): step"),
    ("cuda_runtime", "cudaEventRecord"),
    ("cuda_runtime", "cudaLaunchKernel"),
    ("user_annotation", "ProfilerStep#1"),
    ("something new", "kept"),
    ("cpu_op", "aten::last one, always kept"),
]


@pytest.mark.parametrize("layout", [OLDER, NEWER])
def test_the_prefilter_drops_what_the_filter_would_drop(layout: str) -> None:
    events = ",".join(layout % each for each in [("M", "first one, always kept"), *NAMES])
    text = f'{{"traceEvents": [{events}\n  ]}}'.encode()
    everything, _ = read(text, 10**6)
    filtered, _ = read(text, 10**6, EventFilter().prefilter)
    assert len(everything) == 10
    assert filtered == [
        "first one, always kept",
        "gemm",
        "c10d::allreduce_",
        "cudaLaunchKernel",
        "ProfilerStep#1",
        "kept",
        "aten::last one, always kept",
    ]
    assert "aten::mm" in read(text, 10**6, EventFilter(with_operations=True).prefilter)[0]


@pytest.mark.parametrize(
    ("written", "exact"),
    [
        (b"12", 12_000),
        (b"12.5", 12_500),
        (b"-1.250", -1_250),
        (b"-0.250", -250),
        (b"0.001", 1),
        (b"1e3", 1_000_000),
        (b"1.5e3", 1_500_000),
        (b'"7.001"', 7_001),
        (b'"7"', 7_000),
        (b"4458676524595.135", 4_458_676_524_595_135),
        # A float would be off by 39 nanoseconds here.
        (b"1711964646123456.789", 1_711_964_646_123_456_789),
        (b"12.3456", 12_346),
        (b"12.34500000000001", 12_345),
    ],
)
def test_written(written: bytes, exact: int) -> None:
    assert nanoseconds(written) == exact


@given(st.integers(min_value=0, max_value=2**62))
def test_three_decimals(exact: int) -> None:
    assert nanoseconds(b"%d.%03d" % divmod(exact, 1000)) == exact


@pytest.mark.parametrize("written", [b"", b"null", b'""', b"Infinity", b"nan", b"\xff", b'"soon"'])
def test_no_time(written: bytes) -> None:
    with pytest.raises(ValueError, match="is not a time"):
        nanoseconds(written)
