"""Names and bandwidths of collectives: which kernels communicate, and which operation a name means."""

from __future__ import annotations

import re
from enum import Enum
from functools import lru_cache


class CollectiveKind(str, Enum):
    """Operations between ranks, by the names that torch.distributed gives them."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    GATHER = "gather"
    SCATTER = "scatter"
    SEND = "send"
    RECV = "recv"
    # A kernel of NCCL that sends and receives; its operation is known only from the call.
    SEND_RECV = "send_recv"
    BARRIER = "barrier"
    UNKNOWN = "unknown"


# Only kernels, not annotations: an annotation also covers gaps and other work.
_COMMUNICATES = re.compile(r"(?:void )?(?:nccl|rccl|msccl)", re.IGNORECASE)

# Longer names first: a reduce_scatter is neither a reduce nor a scatter.
_BY_WORD = (
    ("allreduce", CollectiveKind.ALL_REDUCE),
    ("reducescatter", CollectiveKind.REDUCE_SCATTER),
    ("allgather", CollectiveKind.ALL_GATHER),
    ("alltoall", CollectiveKind.ALL_TO_ALL),
    ("broadcast", CollectiveKind.BROADCAST),
    ("sendrecv", CollectiveKind.SEND_RECV),
    ("barrier", CollectiveKind.BARRIER),
    ("gather", CollectiveKind.GATHER),
    ("scatter", CollectiveKind.SCATTER),
    ("reduce", CollectiveKind.REDUCE),
    ("send", CollectiveKind.SEND),
    ("recv", CollectiveKind.RECV),
)


@lru_cache(maxsize=4096)
def communicates(kernel: str) -> bool:
    """Whether a GPU kernel of this name belongs to NCCL or RCCL."""
    return _COMMUNICATES.match(kernel) is not None


def kind_of(name: str) -> CollectiveKind:
    """The operation of a kernel, annotation or argument of this name."""
    plain = name.partition("(")[0].lower().replace("_", "")
    for word, kind in _BY_WORD:
        if word in plain:
            return kind
    return CollectiveKind.UNKNOWN


def short_name(kernel: str) -> str:
    """A kernel's name without its arguments."""
    return kernel.partition("(")[0].strip()


def algorithm_bandwidth(size: int | None, duration_ns: int) -> float | None:
    """Bytes over time in GB/s (1e9 bytes), which is bytes per nanosecond."""
    if size is None or duration_ns <= 0:
        return None
    return round(size / duration_ns, 3)


def bus_bandwidth(kind: CollectiveKind, algorithm: float | None, ranks: int | None) -> float | None:
    """Bandwidth on the links, comparable between operations and numbers of ranks."""
    if algorithm is None or not ranks:
        return None
    return round(algorithm * _factor(kind, ranks), 3)


def _factor(kind: CollectiveKind, ranks: int) -> float:
    if kind is CollectiveKind.ALL_REDUCE:
        return 2 * (ranks - 1) / ranks
    if kind in (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL):
        return (ranks - 1) / ranks
    return 1.0
