"""Decomposes any kind of tensor into plain ones: sparse, quantized, nested, subclasses, distributed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ddpcheck import torch_compat
from ddpcheck.probes.digest.protocol import combine, header_of
from ddpcheck.probes.digest.tensor_bytes import PLAIN_TYPES, dense, has_memory, layout_of


@dataclass(frozen=True, slots=True)
class FlatTensor:
    """A tensor's header with its strided memory, or with its flattened parts."""

    header: bytes
    memory: torch.Tensor | None = None
    parts: tuple[FlatTensor, ...] | None = None

    def spans(self) -> Iterator[tuple[bytes, torch.Tensor]]:
        """Every dense span to hash, with its header; one at a time, since a span may be a copy."""
        if self.memory is not None:
            yield self.header, dense(self.memory)
        for part in self.parts or ():
            yield from part.spans()

    def leaf(self, digests: Iterator[bytes]) -> bytes:
        """The leaf, from the digests of `spans()` in their order."""
        if self.parts is None:
            return next(digests)
        return combine([self.header, *(part.leaf(digests) for part in self.parts)])

    def without_memory(self) -> FlatTensor:
        """What `leaf` needs; keeps no tensor of the user alive until the digests arrive."""
        parts = self.parts if self.parts is None else tuple(part.without_memory() for part in self.parts)
        return FlatTensor(self.header, parts=parts)


class Unreadable(Exception):
    """The tensor's bits cannot be read."""


def flatten(tensor: torch.Tensor) -> FlatTensor | None:
    """What to hash of `tensor`; None where its bits cannot be read."""
    try:
        return _flatten(tensor)
    except Unreadable:
        return None


def is_supported(tensor: torch.Tensor) -> bool:
    """Whether `tensor` gets a leaf of its own rather than the fixed leaf of unreadable tensors."""
    with torch_compat.no_torch_function(), torch.no_grad():
        return flatten(tensor) is not None


def plain_memory(tensor: torch.Tensor) -> torch.Tensor | None:
    """The plain tensor whose memory holds the elements of `tensor`; None if there is no such memory.

    Wrappers and fake tensors have a size, a device and strides like any other tensor, but reading at their address
    crashes the process.
    """
    with torch_compat.no_torch_function(), torch.no_grad():
        flat = flatten(tensor)
        return None if flat is None else flat.memory


def _flatten(tensor: torch.Tensor) -> FlatTensor:
    if tensor.is_meta or torch.nn.parameter.is_lazy(tensor):
        raise Unreadable
    if type(tensor) not in PLAIN_TYPES and (inner := _subclass_parts(tensor)) is not None:
        return inner
    if tensor.is_nested:
        return _assemble("nested", *tensor.unbind())
    if tensor.layout is torch.strided:
        return _quantized(tensor) if tensor.is_quantized else _strided(tensor)
    return _by_layout(tensor)


def _strided(tensor: torch.Tensor) -> FlatTensor:
    try:
        layout = layout_of(tensor)
        # Fake tensors report the device they represent, but their storage is on another one.
        if tensor.untyped_storage().device.type != tensor.device.type or not _holds_span(tensor):
            raise Unreadable
    except RuntimeError as error:  # vmapped and functionalised tensors: no storage
        raise Unreadable from error
    return FlatTensor(layout.header, memory=tensor if type(tensor) in PLAIN_TYPES else _bare(tensor))


def _bare(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a plain tensor: any operation on a subclass could run the user's code."""
    if tensor.is_conj() or tensor.is_neg():
        raise Unreadable
    bare = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return bare.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def _holds_span(tensor: torch.Tensor) -> bool:
    if tensor.numel() == 0:
        return True
    if tensor.untyped_storage().data_ptr() == 0:
        return False  # a wrapper subclass: its storage has a size but no memory
    itemsize = tensor.element_size()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return has_memory(tensor, (last + 1) * itemsize, itemsize)


def _by_layout(tensor: torch.Tensor) -> FlatTensor:
    shape = list(tensor.shape)
    kind = f"{tensor.layout} {tensor.dtype} {shape}"
    if tensor.layout is torch.sparse_coo:
        # As stored, not coalesced: coalescing adds values up, which is arithmetic and not what is in memory.
        parts = torch_compat.sparse_parts(tensor)
        if parts is None:
            raise Unreadable
        return _assemble(f"{kind} {tensor.is_coalesced()}", *parts)
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return _assemble(kind, tensor.crow_indices(), tensor.col_indices(), tensor.values())
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return _assemble(kind, tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    if tensor.layout is torch_compat.lookup(torch_compat.MKLDNN):
        return _assemble(kind, tensor.to_dense())
    raise Unreadable


def _quantized(tensor: torch.Tensor) -> FlatTensor:
    kind = f"quantized {tensor.dtype} {tensor.qscheme()}"
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return _assemble(f"{kind} {tensor.q_scale().hex()} {tensor.q_zero_point()}", tensor.int_repr())
    scales, zeros = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    return _assemble(f"{kind} {tensor.q_per_channel_axis()}", tensor.int_repr(), scales, zeros)


def _subclass_parts(tensor: torch.Tensor) -> FlatTensor | None:
    """A subclass's inner tensors; None if it is an ordinary tensor with another type."""
    if isinstance(tensor, torch_compat.lookup(torch_compat.ASYNC_COLLECTIVE) or ()):
        raise Unreadable  # reading it would wait for the user's collective
    # A ragged dimension has a symbolic size, different in every tensor; its real sizes are in the parts.
    sizes = [size if isinstance(size, int) else "ragged" for size in tensor.shape]
    kind = f"{type(tensor).__qualname__} {tensor.dtype} {sizes}"
    if _is_instance(tensor, "torch.distributed.tensor", "DTensor"):
        return _assemble(kind, tensor.to_local())  # type: ignore[attr-defined]
    if not hasattr(tensor, "__tensor_flatten__"):
        return None
    names, _ = tensor.__tensor_flatten__()
    inner = [getattr(tensor, name) for name in names]
    if not all(isinstance(part, torch.Tensor) for part in inner):
        raise Unreadable
    return _assemble(f"{kind} {names}", *inner)


def _is_instance(tensor: torch.Tensor, module: str, name: str) -> bool:
    """isinstance without importing: a class whose module was never loaded has no instances."""
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(tensor, kind)


def _assemble(description: str, *parts: torch.Tensor) -> FlatTensor:
    return FlatTensor(header_of(description), parts=tuple(_flatten(part) for part in parts))
