"""The options of a survey, from the command line of `ddpcheck links` or of the ranks themselves."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
DEFAULT_SIZES = "64K,256K,1M,4M,16M"


def parse_sizes(text: str) -> tuple[int, ...]:
    """`64K,1M` as bytes, ascending; raises ValueError with a reason."""
    sizes = []
    for word in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*([KMG]?)(?:i?B)?\s*", word, re.IGNORECASE)
        size = int(match[1]) * _UNITS[match[2].upper()] if match else 0
        if not 64 <= size <= 1 << 32:
            raise ValueError(f"{word!r} is not a size from 64 bytes to 4G, as in {DEFAULT_SIZES}")
        sizes.append(size)
    return tuple(sorted(set(sizes)))


def check_seconds(seconds: float) -> float:
    if not (math.isfinite(seconds) and 0.05 <= seconds <= 3600):
        raise ValueError(f"{seconds:g} seconds per pair: must be from 0.05 to 3600")
    return seconds


def check_tolerance(tolerance: float) -> float:
    if not (math.isfinite(tolerance) and tolerance > 1):
        raise ValueError(f"tolerance {tolerance:g}: must be a factor above 1")
    return tolerance


def as_arguments(sizes: Sequence[int], seconds: float, tolerance: float) -> list[str]:
    """Arguments for the ranks."""
    return [
        *("--sizes", ",".join(map(str, sizes))),
        *("--seconds", f"{seconds:g}"),
        *("--tolerance", f"{tolerance:g}"),
    ]


def failure_file(result: Path) -> Path:
    """Where a rank says why it measured nothing."""
    return result.with_name(f".{result.name}.failed")
