"""Fingerprints of training batches: a few kilobytes, sampled from all tensors of a batch."""

from __future__ import annotations

import hashlib
from array import array
from collections import UserDict
from dataclasses import fields, is_dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from ddpcheck import torch_compat
from ddpcheck.probes.digest.device_copy import HostCopy, copy_to_host
from ddpcheck.probes.digest.tensor_bytes import PLAIN_TYPES, dense, direct_span, layout_of

# Bytes read in total, however large the batch is, in short windows over each tensor: the edges of an image are black
# and the ends of a text are padding in every batch.
BUDGET = 16 << 10
WINDOW = 256
MAX_PARTS = 64
MAX_DEPTH = 6
# Elements read of a tensor that is not one span of memory, or that is on a device.
MAX_DOWNSAMPLED = 2048
MAX_WORDS = 256
MAX_COUNTED = 1 << 18


class Fingerprint(NamedTuple):
    """Equal for equal batches. `variety`: how many distinct values the digest is based on."""

    digest: str
    variety: int
    counts: tuple[int, ...] = ()
    # One digest per tensor; empty for a tensor with a single value, such as a scalar or a mask of ones.
    parts: tuple[str, ...] = ()


EMPTY_FINGERPRINT = Fingerprint("", 0)


class BatchContents:
    """The contents of a nested structure in order: tensors, memory of arrays, plain values."""

    def __init__(self, *things: Any) -> None:
        self.tensors: list[torch.Tensor] = []
        self.spans: list[memoryview] = []
        self.plain: list[str] = []
        self.texts: set[str] = set()
        self.named: dict[str, Any] = {}
        for thing in things:
            # Each argument has its own limit: a long list in one must not hide the next.
            self._limit = self._size() + MAX_PARTS
            self._add(thing, "", MAX_DEPTH)

    def _size(self) -> int:
        return len(self.tensors) + len(self.spans) + len(self.plain)

    def _add(self, thing: Any, name: str, depth: int) -> None:
        if self._size() >= self._limit:
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
            if "O" not in view.format:  # addresses of Python objects are not data
                self.spans.append(view.cast("B"))
        except (TypeError, ValueError, BufferError):
            pass  # no plain memory: strings, strided arrays, …

    def rows(self) -> int:
        """The batch size: the first dimension of the first tensor, if most others have the same; else 0."""
        sizes = [tensor.shape[0] for tensor in self.tensors if tensor.dim()]
        return sizes[0] if sizes and 2 * sizes.count(sizes[0]) >= len(sizes) else 0


def _items(thing: Any) -> list[tuple[str, Any]]:
    """The parts of a structure by name; objects that are neither data nor plain containers have none."""
    if isinstance(thing, (dict, UserDict)):
        return [(str(key), value) for key, value in thing.items()]
    if isinstance(thing, (list, tuple)):
        step = -(-len(thing) // MAX_PARTS) or 1
        return [("", thing[index]) for index in range(0, len(thing), step)]
    if isinstance(thing, (torch.nn.Module, type)) or callable(thing):
        return []
    if is_dataclass(thing):
        return [(field.name, getattr(thing, field.name, None)) for field in fields(thing)]
    attributes = getattr(thing, "__dict__", None)
    return list(attributes.items()) if isinstance(attributes, dict) else []


class FingerprintFuture:
    """A fingerprint that may be pending: complete immediately on CPU; on a device, when its copy has arrived."""

    def __init__(
        self,
        shape: bytes,
        texts: int,
        on_host: list[bytes],
        copies: list[HostCopy],
        sizes: list[list[int]],
        counts: list[int],
        counted: int,
    ) -> None:
        # Not data, but part of the digest: dtypes, shapes, plain values. And the number of texts.
        self._shape = shape
        self._texts = texts
        self._on_host = on_host
        self._copies = copies
        # For each copy, the sizes of its tensors in bytes.
        self._sizes = sizes
        self._counts = counts
        # The number of counts at the end of the first copy.
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
        data = b"".join([*self._on_host, *arrived])
        if not data and not self._texts:
            return Fingerprint("", 0, tuple(counts))
        digest = hashlib.blake2b(self._shape + data, digest_size=6).hexdigest()
        pieces = [
            *self._on_host,
            *(
                piece
                for data, sizes in zip(arrived, self._sizes, strict=True)
                for piece in _split(data, sizes)
            ),
        ]
        return Fingerprint(
            digest, _count_distinct(data) + self._texts, tuple(counts), tuple(map(_part_digest, pieces))
        )


def fingerprint_batch(
    contents: BatchContents, to_count: list[tuple[torch.Tensor, int]] | None = None
) -> FingerprintFuture:
    """Start a fingerprint. `to_count`: tensors with a value; the elements that differ from it are counted."""
    shapes = [f"{tensor.dtype}{list(tensor.shape)}" for tensor in contents.tensors]
    shape = "\0".join([*contents.plain, *shapes]).encode("utf-8", "replace")
    on_device: dict[torch.device, list[torch.Tensor]] = {}
    share = BUDGET // max(1, len(contents.tensors) + len(contents.spans))
    on_host = [_windows(span, share) for span in contents.spans]
    # The user's default device and other modes must not affect ddpcheck.
    with torch_compat.no_torch_function(), torch.no_grad():
        for tensor in contents.tensors:
            if tensor.is_cpu:
                on_host.append(read_sampled(tensor, share))
            elif _is_plain(tensor):
                on_device.setdefault(tensor.device, []).append(_as_bytes(_downsampled(tensor)))
        sizes = [[piece.numel() for piece in pieces] for pieces in on_device.values()]
        counts, counting = _count(to_count or [])
        for device, numbers in counting.items():
            on_device.setdefault(device, []).extend(_as_bytes(number) for number in numbers)
        copies = [copy_to_host(torch.cat(pieces).view(1, -1)) for pieces in on_device.values()]
    counted = sum(map(len, counting.values()))
    # Counts after the samples of one device can be located; with several devices they would be ambiguous.
    counted = counted if len(on_device) == 1 else 0
    return FingerprintFuture(shape, len(contents.texts), on_host, copies, sizes, counts, counted)


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in PLAIN_TYPES
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not tensor.is_quantized
    )


def read_sampled(tensor: torch.Tensor, share: int) -> bytes:
    """Up to about `share` bytes of a tensor on the host; none of a tensor whose memory cannot be read."""
    if not _is_plain(tensor) or not tensor.numel():
        return b""
    span = direct_span(tensor)
    if span is None:
        small = dense(_downsampled(tensor))
        if not small.untyped_storage().nbytes():
            return b""
        span = (layout_of(small), small.data_ptr())
    layout, address = span
    return _windows(memoryview(layout.buffer_at(address)).cast("B"), share)


def _windows(span: memoryview, share: int) -> bytes:
    """Samples of a span, including its begin and its end."""
    if len(span) <= share:
        return bytes(span)
    count = max(2, share // WINDOW)
    last = len(span) - WINDOW
    # Multiples of 8, so that samples hold complete values.
    return b"".join(
        [span[at : at + WINDOW] for at in (index * last // (count - 1) & ~7 for index in range(count))]
    )


def _downsampled(tensor: torch.Tensor) -> torch.Tensor:
    """Every n-th element along each dimension: a view, whatever the strides."""
    view, left = tensor.detach(), MAX_DOWNSAMPLED
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
    """Counts on CPU; on a device, tensors of counts that are still to be copied."""
    on_host: list[int] = []
    pending: dict[torch.device, list[torch.Tensor]] = {}
    for tensor, excluded in wanted:
        if not _is_plain(tensor) or tensor.numel() > MAX_COUNTED:
            on_host.append(0)
        elif tensor.is_cpu:
            on_host.append(int(torch.count_nonzero(tensor != excluded).item()))
        else:
            pending.setdefault(tensor.device, []).append((tensor != excluded).sum())
    return on_host, pending


def _count_distinct(data: bytes) -> int:
    """How many distinct words there are among the sampled ones: a batch of zeros has one."""
    words = memoryview(data[: len(data) & ~7]).cast("Q")
    return len(set(words[:: max(1, len(words) // MAX_WORDS)]))


def _split(data: bytes, sizes: list[int]) -> list[bytes]:
    ends = list(accumulate(sizes))
    return [data[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _part_digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=4).hexdigest() if _count_distinct(data) > 1 else ""
