"""Decodes lines directly into records with msgspec: many times faster than through dictionaries."""

from __future__ import annotations

import re

import msgspec

from ddpcheck.records.registry import Record, record_kinds

# The beginning of every line that a rank writes.
_KIND = re.compile(rb'\{"kind":"(\w+)"')
_DECODERS = {kind.encode(): msgspec.json.Decoder(cls) for kind, cls in record_kinds().items()}


def decode(line: bytes) -> Record | None:
    """None for a line that this fast path does not understand: it may be damaged, or only formatted differently."""
    match = _KIND.match(line)
    decoder = _DECODERS.get(match[1]) if match else None
    if decoder is None:
        return None
    try:
        return decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
