"""The message of a collective, from the arguments of its events: elements, dtype, bytes, process group."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import msgspec

from ddpcheck.traces.events import Args
from ddpcheck.traces.kernels import CollectiveKind, kind_of

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
