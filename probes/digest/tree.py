"""From leaves to a root: one digest for a whole list of digests."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from ddpcheck.probes.digest.protocol import digest_size

# The leaf of a tensor whose bits cannot be read: the same everywhere, and never the leaf of one that can.
UNSUPPORTED = b"\xff" * digest_size


def combine(leaves: Sequence[bytes]) -> bytes:
    """The root of `leaves`; depends on each of them, on their order and on their number."""
    # A running hash of equal-sized items: no two lists give the same input, so no separators are needed.
    return hashlib.blake2b(b"".join(leaves), digest_size=digest_size, person=b"ddpcheck tree").digest()
