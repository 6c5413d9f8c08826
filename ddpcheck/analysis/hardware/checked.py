"""Values out of a log, each of the type it should have or nothing: logs may be torn, old, or of another's making."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Counters have 64 bits; a larger number is none.
_LARGEST = 1 << 64


def whole(raw: Any) -> int | None:
    return raw if type(raw) is int and 0 <= raw < _LARGEST else None


def number(raw: Any) -> float | None:
    return float(raw) if type(raw) in (int, float) and abs(raw) < _LARGEST else None


def wholes(raw: Any) -> tuple[int, ...]:
    """All of them, or none where one of them is no number."""
    if not isinstance(raw, list) or any(whole(item) is None for item in raw):
        return ()
    return tuple(raw)


def text(raw: Any) -> str:
    return raw if isinstance(raw, str) else ""


def texts(raw: Any) -> tuple[str, ...]:
    return tuple(item for item in raw if isinstance(item, str)) if isinstance(raw, list) else ()


def rows(raw: Any) -> list[Mapping[str, Any]]:
    return [row for row in raw if isinstance(row, dict)] if isinstance(raw, list) else []


def mapping(raw: Any) -> Mapping[str, Any]:
    return raw if isinstance(raw, dict) else {}
