"""Digests of tensors: 16 bytes that show whether two ranks hold the same bits."""

from ddpcheck.probes.digest.digester import ENV_HASH, Digester, make_digester
from ddpcheck.probes.digest.flatten import is_supported, plain_memory
from ddpcheck.probes.digest.protocol import (
    DIGEST_SIZE,
    UNSUPPORTED,
    DigestFuture,
    Leaves,
    ReadyDigests,
    combine,
)

__all__ = [
    "DIGEST_SIZE",
    "ENV_HASH",
    "UNSUPPORTED",
    "DigestFuture",
    "Digester",
    "Leaves",
    "ReadyDigests",
    "combine",
    "is_supported",
    "make_digester",
    "plain_memory",
]
