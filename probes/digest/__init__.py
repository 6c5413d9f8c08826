"""Digests of tensors: 16 bytes that tell whether two ranks hold the same bits."""

from ddpcheck.probes.digest.digester import ENV_HASH, Digester, make_digester
from ddpcheck.probes.digest.flatten import is_supported, plain_memory
from ddpcheck.probes.digest.protocol import UNSUPPORTED, DigestFuture, ReadyDigests, combine, digest_size
from ddpcheck.probes.digest.xxh3 import Reading

__all__ = [
    "ENV_HASH",
    "UNSUPPORTED",
    "DigestFuture",
    "Digester",
    "Reading",
    "ReadyDigests",
    "combine",
    "digest_size",
    "is_supported",
    "make_digester",
    "plain_memory",
]
