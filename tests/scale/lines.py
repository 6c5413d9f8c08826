"""Templates of record lines: a million lines are written, and few of their fields change."""

from __future__ import annotations

import hashlib
import json
from typing import Any

Raw = dict[str, Any]
# Fields that change with step or rank, by kind of record, and their formats.
_FILLED = {
    "backward": {"number": "%d", "step": "%d", "local": "%s", "reduced": "%s", "root": "%s", "time": "%.6f"},
    "applied": {"step": "%d", "root": "%s"},
    "digest": {"step": "%d", "root": "%s", "leaves": "%s", "time": "%.4f", "forward": "%d"},
    "batch": {"forward": "%d", "step": "%d", "digest": "%s"},
    "memory": {"step": "%d"},
}


def form_of(raw: Raw) -> str:
    """A line with `%(name)…` in place of each field that changes."""
    filled = {name: how for name, how in _FILLED[raw["kind"]].items() if name in raw}
    marked = {**raw, **{name: f"@{name}@" for name in filled}}
    text = line_of(marked).replace("%", "%%")
    for name, how in filled.items():
        written = f"%({name}){how[1:]}"
        text = text.replace(f'"@{name}@"', f'"{written}"' if how == "%s" else written)
    return text


def line_of(raw: Raw) -> str:
    return json.dumps(raw, separators=(",", ":")) + "\n"


def digits(size: int, *what: object) -> str:
    """`size` hexadecimal digits that depend only on `what`."""
    return hashlib.blake2b(repr(what).encode(), digest_size=(size + 1) // 2).hexdigest()[:size]
