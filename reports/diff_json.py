"""A comparison of two runs as strict JSON; docs/diff.md describes it."""

from __future__ import annotations

import json
from dataclasses import asdict

from ddpcheck.diff.model import Comparison
from ddpcheck.reports.json_report import plain

# The order of the keys: the verdict and the first difference first, the bulk last.
_TOP_LEVEL = (
    "schema",
    "verdict",
    "method",
    "first",
    "cause",
    "suspects",
    "then",
    "notes",
    "a",
    "b",
    "compared",
    "growth",
)


def to_json(comparison: Comparison) -> str:
    """One document, ending in a newline."""
    fields = asdict(comparison)
    document = {name: plain(fields[name]) for name in _TOP_LEVEL}
    return json.dumps(document, indent=2, allow_nan=False) + "\n"
