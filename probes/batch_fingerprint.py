"""A fingerprint of what a rank is about to train on: a few kilobytes, spread over all tensors of a batch."""

from __future__ import annotations

import hashlib
from array import array
from collections import UserDict
from dataclasses import fields, is_dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from ddpcheck.probes.digest.device_copy import Copy, copy_to_host
from ddpcheck.probes.digest.tensor_bytes import PLAIN_TYPES, dense, direct_span, layout_of

# Read in all, however large the batch is. Short windows over the whole of a tensor: the edges of an image are
# black and the ends of a text are padding in every batch.
BUDGET = 16 << 10
WINDOW = 256
MOST_PARTS = 64
DEPTH = 6
# Elements of a tensor that is not one span of memory, or lies on a device.
THINNED = 2048
MOST_WORDS = 256
MOST_COUNTED = 1 << 18


class Fingerprint(NamedTuple):
    """Equal for equal batches. `variety` tells how many different values it rests on."""

    digest: str
    variety: int
    counts: tuple[int, ...] = ()
    # Of each tensor alone; empty where it holds one value only, as a scalar or a mask of ones does.
    parts: tuple[str, ...] = ()


NOTHING = Fingerprint("", 0)


class Contents:
    """What a nested structure holds, in order: tensors, memory of arrays, plain values."""

    def __init__(self, *things: Any) -> None:
        self.tensors: list[torch.Tensor] = []
        self.spans: list[memoryview] = []
        self.plain: list[str] = []
        self.texts: set[str] = set()
        self.named: dict[str, Any] = {}
        for thing in things:
            # Each has a share of its own: a long list in one must not hide the next.
            self._most = self._found() + MOST_PARTS
            self._add(thing, "", DEPTH)

    def _found(self) -> int:
        return len(self.tensors) + len(self.spans) + len(self.plain)

    def _add(self, thing: Any, name: str, depth: int) -> None:
        if self._found() >= self._most:
            return
        if isinstance(thing, torch.Tensor):
            self.tensors.append(thing)
            self.named.setdefault(name, thing)
        elif isinstance(thing, (str, bytes, int, float)):
            self.plain.append(repr(thing[:200] if isinstance(thing, (str, bytes)) else thing))
            if isinstance(thing, (str, bytes)):
                self.texts.add(self.plain[-1])
            self.named.setdefault(name, thing)
        elif isinstance(thing, (range, slice)):
            self.plain.append(repr(thing))
        elif isinstance(thing, array) or type(thing).__module__ == "numpy":
            self._add_array(thing)
        elif depth > 0:
            for key, item in _items(thing):
                self._add(item, key, depth - 1)

    def _add_array(self, numbers: Any) -> None:
        try:
            view = memoryview(numbers)
            if "O" not in view.format:  # addresses of Python objects say nothing
                self.spans.append(view.cast("B"))
        except (TypeError, ValueError, BufferError):
            pass  # no plain memory: strings, strided arrays, …

    def rows(self) -> int:
        """The batch's size: the first tensor's first dimension, if most others say the same; else 0."""
        sizes = [tensor.shape[0] for tensor in self.tensors if tensor.dim()]
        return sizes[0] if sizes and 2 * sizes.count(sizes[0]) >= len(sizes) else 0


def _items(thing: Any) -> list[tuple[str, Any]]:
    """The parts of a structure by name; what is neither data nor a plain holder of data has none."""
    if isinstance(thing, (dict, UserDict)):
        return [(str(key), value) for key, value in thing.items()]
    if isinstance(thing, (list, tuple)):
        step = -(-len(thing) // MOST_PARTS) or 1
        return [("", thing[place]) for place in range(0, len(thing), step)]
    if isinstance(thing, (torch.nn.Module, type)) or callable(thing):
        return []
    if is_dataclass(thing):
        return [(field.name, getattr(thing, field.name, None)) for field in fields(thing)]
    held = getattr(thing, "__dict__", None)
    return list(held.items()) if isinstance(held, dict) else []


class Taken:
    """A fingerprint under way: complete at once on CPU; from a device, once its copy has arrived."""

    def __init__(
        self,
        shape: bytes,
        texts: int,
        known: list[bytes],
        copies: list[Copy],
        sizes: list[list[int]],
        counts: list[int],
        counted: int,
    ) -> None:
        # What is no data, but makes a difference: dtypes, shapes, plain values. And how many texts there are.
        self._shape = shape
        self._texts = texts
        self._known = known
        self._copies = copies
        # Of each copy, the bytes that its tensors take.
        self._sizes = sizes
        self._counts = counts
        # So many counts stand at the end of the first copy.
        self._counted = counted

    def ready(self) -> bool:
        return all(copy.ready() for copy in self._copies)

    def fingerprint(self) -> Fingerprint:
        arrived = [bytes(copy.rows()[0]) for copy in self._copies]
        counts = list(self._counts)
        if self._counted:
            tail = 8 * self._counted
            numbers = memoryview(arrived[0][-tail:]).cast("q")
            counts += list(numbers)
            arrived[0] = arrived[0][:-tail]
        data = b"".join([*self._known, *arrived])
        if not data and not self._texts:
            return Fingerprint("", 0, tuple(counts))
        digest = hashlib.blake2b(self._shape + data, digest_size=6).hexdigest()
        pieces = [
            *self._known,
            *(
                piece
                for whole, sizes in zip(arrived, self._sizes, strict=True)
                for piece in _cut(whole, sizes)
            ),
        ]
        return Fingerprint(digest, _variety(data) + self._texts, tuple(counts), tuple(map(_part, pieces)))


def take(contents: Contents, to_count: list[tuple[torch.Tensor, int]] | None = None) -> Taken:
    """Read the samples. `to_count`: of these tensors, how many elements are not the value beside them."""
    shapes = [f"{tensor.dtype}{list(tensor.shape)}" for tensor in contents.tensors]
    shape = "\0".join([*contents.plain, *shapes]).encode("utf-8", "replace")
    on_device: dict[torch.device, list[torch.Tensor]] = {}
    share = BUDGET // max(1, len(contents.tensors) + len(contents.spans))
    known = [_windows(span, share) for span in contents.spans]
    # A default device, or any other mode of the user's, is not meant for us.
    with torch._C.DisableTorchFunction(), torch.no_grad():
        for tensor in contents.tensors:
            if tensor.is_cpu:
                known.append(_read(tensor, share))
            elif _plain(tensor):
                on_device.setdefault(tensor.device, []).append(_as_bytes(_thinned(tensor)))
        sizes = [[piece.numel() for piece in pieces] for pieces in on_device.values()]
        counts, counting = _count(to_count or [])
        for device, numbers in counting.items():
            on_device.setdefault(device, []).extend(_as_bytes(number) for number in numbers)
        copies = [copy_to_host(torch.cat(pieces).view(1, -1)) for pieces in on_device.values()]
    counted = sum(map(len, counting.values()))
    # Counts behind the samples of one device can be found again; of several they could not be told apart.
    counted = counted if len(on_device) == 1 else 0
    return Taken(shape, len(contents.texts), known, copies, sizes, counts, counted)


def _plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in PLAIN_TYPES
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not tensor.is_quantized
    )


def _read(tensor: torch.Tensor, share: int) -> bytes:
    if not _plain(tensor) or not tensor.numel():
        return b""
    span = direct_span(tensor)
    if span is None:
        small = dense(_thinned(tensor))
        if not small.untyped_storage().nbytes():
            return b""
        span = (layout_of(small), small.data_ptr())
    layout, address = span
    return _windows(memoryview(layout.buffer_at(address)).cast("B"), share)


def _windows(span: memoryview, share: int) -> bytes:
    """Samples from beginning to end of a span, both included."""
    if len(span) <= share:
        return bytes(span)
    count = max(2, share // WINDOW)
    last = len(span) - WINDOW
    # Multiples of 8, so that samples hold whole values.
    return b"".join(
        [span[at : at + WINDOW] for at in (place * last // (count - 1) & ~7 for place in range(count))]
    )


def _thinned(tensor: torch.Tensor) -> torch.Tensor:
    """Every so-manieth element along each dimension: a view, whatever the strides."""
    view, left = tensor.detach(), THINNED
    for dim, size in enumerate(tensor.shape):
        keep = max(1, min(size, 32 if dim == 0 and tensor.dim() > 1 else left))
        index = (slice(None),) * dim + (slice(None, None, max(1, -(-size // keep))),)
        view = view[index]
        left = max(1, left // keep)
    return view


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.resolve_conj().resolve_neg().reshape(-1).contiguous()
    return (torch.view_as_real(plain).reshape(-1) if plain.is_complex() else plain).view(torch.uint8)


def _count(
    wanted: list[tuple[torch.Tensor, int]],
) -> tuple[list[int], dict[torch.device, list[torch.Tensor]]]:
    """At once on CPU; on a device as numbers that are still to arrive."""
    known: list[int] = []
    coming: dict[torch.device, list[torch.Tensor]] = {}
    for tensor, unless in wanted:
        if not _plain(tensor) or tensor.numel() > MOST_COUNTED:
            known.append(0)
        elif tensor.is_cpu:
            known.append(int(torch.count_nonzero(tensor != unless).item()))
        else:
            coming.setdefault(tensor.device, []).append((tensor != unless).sum())
    return known, coming


def _variety(data: bytes) -> int:
    """How many different words there are among those looked at: a batch of zeros has one."""
    words = memoryview(data[: len(data) & ~7]).cast("Q")
    return len(set(words[:: max(1, len(words) // MOST_WORDS)]))


def _cut(whole: bytes, sizes: list[int]) -> list[bytes]:
    ends = list(accumulate(sizes))
    return [whole[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _part(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=4).hexdigest() if _variety(data) > 1 else ""
