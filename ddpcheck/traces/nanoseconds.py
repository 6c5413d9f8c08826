"""Times as traces write them, microseconds in decimal, as exact whole nanoseconds."""

from __future__ import annotations

from decimal import ROUND_HALF_EVEN, Decimal, InvalidOperation


def nanoseconds(written: bytes) -> int:
    """The number in `written`, quoted or not, times a thousand.

    Never through a float: microseconds since 1970 with three decimals need more digits than a float holds.
    """
    try:
        # Nearly all times have three decimals or none.
        return int(written.replace(b".", b"")) if written[-4:-3] == b"." else int(written) * 1000
    except ValueError:
        return _rounded(written.strip(b'"'))


def _rounded(written: bytes) -> int:
    try:
        exact = Decimal(written.decode("ascii")) * 1000
        return int(exact.to_integral_value(ROUND_HALF_EVEN))
    except (InvalidOperation, OverflowError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"{written!r} is not a time") from error
