"""The packed leaves and samples of a record, unpacked."""

from __future__ import annotations

import base64
import binascii


def unpack_leaves(text: str, width: int) -> list[bytes]:
    """One digest a tensor, each `width` bytes; what cannot be decoded gives an empty list."""
    data = _decode(text)
    if width <= 0 or len(data) % width:
        return []
    return [data[at : at + width] for at in range(0, len(data), width)]


def unpack_samples(text: str) -> list[bytes]:
    """The first bytes of each tensor."""
    data = _decode(text)
    samples: list[bytes] = []
    at = 0
    while at < len(data):
        size = data[at]
        samples.append(data[at + 1 : at + 1 + size])
        at += 1 + size
    return samples


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return b""
