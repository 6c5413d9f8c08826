"""Unpacks the leaves and samples of digest and detail records."""

from __future__ import annotations

import base64
import binascii


def unpack_leaves(text: str, width: int) -> list[bytes]:
    """The digests of all tensors, `width` bytes each; an empty list where `text` cannot be decoded."""
    data = _decode(text)
    if width <= 0 or len(data) % width:
        return []
    return [data[offset : offset + width] for offset in range(0, len(data), width)]


def unpack_samples(text: str) -> list[bytes]:
    """The first bytes of each tensor."""
    data = _decode(text)
    samples: list[bytes] = []
    offset = 0
    while offset < len(data):
        size = data[offset]
        samples.append(data[offset + 1 : offset + 1 + size])
        offset += 1 + size
    return samples


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return b""
