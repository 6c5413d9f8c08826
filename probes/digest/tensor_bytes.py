"""The bytes of a strided tensor as one dense span of memory, without a copy where possible."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ddpcheck.probes.digest.protocol import describe, header_of, lane_starts, seed_of

# at::parallel_for stays on the calling thread up to this many elements. A digest may run on a thread of its
# own, where a parallel region would start a second pool of OpenMP workers beside the user's.
SERIAL_ELEMENTS = 32767

# Subclasses may hide their data behind __torch_dispatch__; these two never do. torch.nn.Buffer makes plain tensors.
PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})

_LAYOUTS_KEPT = 8192


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Everything that follows from dtype, shape and strides alone, computed once for each combination."""

    dtype: torch.dtype
    numel: int
    nbytes: int
    itemsize: int
    # Whether the span at data_ptr() is the whole tensor, bit for bit.
    direct: bool
    # Whether its elements are also in row-major order.
    by_rows: bool
    header: bytes
    lane_starts: list[int]
    seed: int
    # Views `nbytes` bytes at an address; ctypes reads every dtype, numpy does not.
    buffer_at: Callable[[int], ctypes.Array[ctypes.c_char]]


_Key = tuple[torch.dtype, torch.Size, tuple[int, ...]]
_layouts: dict[_Key, TensorLayout] = {}


def layout_of(tensor: torch.Tensor) -> TensorLayout:
    key = (tensor.dtype, tensor.size(), tensor.stride())
    return _layouts.get(key) or _cache_layout(key, tensor)


def _cache_layout(key: _Key, tensor: torch.Tensor) -> TensorLayout:
    if len(_layouts) >= _LAYOUTS_KEPT:
        _layouts.clear()  # bounds memory when shapes change with every batch
    layout = _layouts[key] = _make_layout(tensor)
    return layout


def _make_layout(tensor: torch.Tensor) -> TensorLayout:
    itemsize = tensor.element_size()
    nbytes = tensor.numel() * itemsize
    header = header_of(describe(tensor.dtype, tensor.shape, tensor.stride()))
    # Complex tensors may carry a conjugate bit, quantized ones a scale: neither is part of dtype or strides.
    ordinary = not tensor.dtype.is_complex and not tensor.is_quantized
    return TensorLayout(
        dtype=tensor.dtype,
        numel=tensor.numel(),
        nbytes=nbytes,
        itemsize=itemsize,
        direct=ordinary and is_dense(tensor.shape, tensor.stride()),
        by_rows=ordinary and tensor.is_contiguous(),
        header=header,
        lane_starts=lane_starts(header),
        seed=seed_of(header),
        buffer_at=(ctypes.c_char * nbytes).from_address,
    )


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements fill one span, each byte once: contiguous, transposed, channels_last, …"""
    if 0 in shape:
        return True
    expected = 1
    moving = [(stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1]
    for stride, size in sorted(moving):
        if stride != expected:
            return False
        expected *= size
    return True


def has_memory(tensor: torch.Tensor, nbytes: int, itemsize: int) -> bool:
    """Whether the storage still holds the span.

    A freed storage (FSDP and offloading resize it to 0) leaves views with a data_ptr() of null plus their offset:
    reading there crashes the process.
    """
    storage = tensor.untyped_storage()
    return storage.nbytes() >= tensor.storage_offset() * itemsize + nbytes


def direct_span(tensor: torch.Tensor) -> tuple[TensorLayout, int] | None:
    """Layout and address of a tensor that can be hashed in place; None: it must be flattened first.

    Nothing about a tensor is cached from one step to the next, since users replace `.data` under the same object and
    allocators reuse addresses: only the current attributes of the tensor count.
    """
    if type(tensor) not in PLAIN_TYPES or tensor.layout is not torch.strided:
        return None
    try:
        # layout_of and has_memory inlined: this runs for every tensor of every step, and the calls would take a
        # fifth of the time.
        key = (tensor.dtype, tensor.size(), tensor.stride())
        layout = _layouts.get(key) or _cache_layout(key, tensor)
        end = tensor.storage_offset() * layout.itemsize + layout.nbytes
        if not layout.direct or tensor.is_neg() or tensor.untyped_storage().nbytes() < end:
            return None
        address = tensor.data_ptr()
        return (layout, address) if address or not layout.nbytes else None
    except RuntimeError:
        return None  # nested, vmapped, …: no strides or no storage


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` with its memory in one dense span: itself, a view of it, or a contiguous copy."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            # An expanded dimension repeats one slice; copying it could need any amount of memory.
            tensor = tensor.narrow(dim, 0, 1)
    if is_dense(tensor.shape, tensor.stride()):
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    copy_serially(copy, tensor)
    return copy


def copy_serially(target: torch.Tensor, source: torch.Tensor) -> None:
    """copy_ in pieces small enough to stay on the calling thread."""
    if source.numel() <= SERIAL_ELEMENTS or source.device.type != "cpu":
        target.copy_(source)
        return
    rows = max(1, SERIAL_ELEMENTS * source.shape[0] // source.numel())
    for start in range(0, source.shape[0], rows):
        inner = slice(start, start + rows) if source.shape[0] > 1 else 0
        copy_serially(target[inner], source[inner])


def span_view(dense_tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A dense tensor's span as a flat tensor of another dtype, whose size must divide its size and offset."""
    nbytes = dense_tensor.numel() * dense_tensor.element_size()
    offset = dense_tensor.storage_offset() * dense_tensor.element_size()
    view = torch.empty(0, dtype=dtype, device=dense_tensor.device)
    # Not tensor.view(dtype), which refuses some dtypes and strides. `view` has a version counter of its own.
    first, count = offset // dtype.itemsize, nbytes // dtype.itemsize
    return view.set_(dense_tensor.untyped_storage(), first, (count,), (1,))
