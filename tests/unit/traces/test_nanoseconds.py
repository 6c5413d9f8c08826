"""Times come out to the nanosecond, however they are written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpcheck.traces.events import nanoseconds


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
