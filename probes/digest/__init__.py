"""Digests of tensors: 16 bytes that tell whether two ranks hold the same bits."""

from .digester import ENV_HASH, Digester, make_digester
from .label import digest_size
from .outline import is_supported, plain_memory
from .ticket import ReadyTicket, Ticket
from .tree import UNSUPPORTED, combine
from .xxh3 import Reading

__all__ = [
    "ENV_HASH",
    "UNSUPPORTED",
    "Digester",
    "Reading",
    "ReadyTicket",
    "Ticket",
    "combine",
    "digest_size",
    "is_supported",
    "make_digester",
    "plain_memory",
]
