"""A collective: which operation a kernel's name means, its message (elements, dtype, bytes, group), its bandwidth."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

import msgspec

from ddpcheck.traces.events import Args


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
# The kernels of symmetric memory (torch.ops.symm_mem) are named after their algorithm.
_COMMUNICATES = re.compile(
    r"(?:void )?(?:\w+::|\(anonymous namespace\)::)*(?:nccl|rccl|msccl|multimem_\w*(?:reduce|gather)|"
    r"(?:one|two)_shot_all_?reduce|symm_mem)",
    re.IGNORECASE,
)

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


# Two spellings: of process groups ("Float") and of recorded shapes ("float", "c10::BFloat16").
_BYTES = {
    "double": 8,
    "float": 4,
    "half": 2,
    "bfloat16": 2,
    "long": 8,
    "long int": 8,
    "int": 4,
    "short": 2,
    "short int": 2,
    "char": 1,
    "signed char": 1,
    "byte": 1,
    "unsigned char": 1,
    "bool": 1,
    "complexfloat": 8,
    "complexdouble": 16,
    "complexhalf": 4,
    "complex<float>": 8,
    "complex<double>": 16,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
}


@dataclass(frozen=True)
class Message:
    """Size, dtype and process group of a collective; None if unknown."""

    kind: CollectiveKind = CollectiveKind.UNKNOWN
    elements_in: int | None = None
    elements_out: int | None = None
    dtype: str | None = None
    group: str | None = None
    group_ranks: str | None = None
    group_size: int | None = None
    sequence: int | None = None

    def bytes_for(self, kind: CollectiveKind) -> int | None:
        """The message size for bandwidths: for an all_gather the whole result."""
        elements = self.elements_out if kind is CollectiveKind.ALL_GATHER else self.elements_in
        size = _size_of(self.dtype)
        return None if elements is None or size is None else elements * size

    def filled_from(self, other: Message) -> Message:
        """This message, with unknown fields taken from `other`."""
        mine = {name: getattr(self, name) for name in self.__dataclass_fields__}
        unknown = [name for name, value in mine.items() if value is None or value is CollectiveKind.UNKNOWN]
        return Message(**{**mine, **{name: getattr(other, name) for name in unknown}})


def message_in(args: Args) -> Message:
    """The message that the arguments of a kernel, an operation or an annotation describe."""
    return Message(
        kind=kind_of(str(args.collective_name or "")),
        elements_in=_number(args.elements_in, args.size_in),
        elements_out=_number(args.elements_out, args.size_out),
        dtype=_word(args.dtype),
        group=_word(args.group),
        group_ranks=_word(args.group_ranks),
        group_size=_number(args.group_size),
        sequence=_number(args.sequence),
    ).filled_from(_from_shapes(args))


def _from_shapes(args: Args) -> Message:
    """From the input shapes and types that `record_shapes=True` adds to an annotation."""
    if not (args.shapes and args.types):
        return Message()
    shapes, types = msgspec.json.decode(args.shapes), msgspec.json.decode(args.types)
    if not (isinstance(shapes, list) and isinstance(types, list)):
        return Message()
    typed = [(shape, dtype) for shape, dtype in zip(shapes, types, strict=False) if _size_of(dtype)]
    count = sum(math.prod(shape) for shape, _ in typed if _is_shape(shape))
    return Message(elements_in=count, dtype=str(typed[0][1])) if count else Message()


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list) and all(isinstance(size, int) for size in shape)


def _size_of(dtype: object) -> int | None:
    plain = str(dtype).lower().replace("c10::", "").replace("torch.", "")
    if plain.startswith("float8"):
        return 1
    return _BYTES.get(plain)


def _word(value: Any) -> str | None:
    return None if value in (None, "") else str(value)


def _number(*values: Any) -> int | None:
    """The first value that is a number or the text of one."""
    for value in values:
        if isinstance(value, int) or (isinstance(value, str) and value.isdigit()):
            return int(value)
    return None
