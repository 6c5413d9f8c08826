"""The sketch of one tensor: its sum under fixed random signs, its norm, its count of non-finite values."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import torch

from ddpcheck.probes.digest.flatten import plain_memory
from ddpcheck.probes.digest.tensor_bytes import PLAIN_TYPES, copy_serially, direct_span
from ddpcheck.probes.sketches.native import MOST_PIECES, NativeKernel, NativeTotals, native_kernel
from ddpcheck.records.sketch_signs import BLOCK, PIECE, signs, weight

# Norms between these are good to 1 part in 10,000 in float32: no square overflows, none that counts is lost.
_NORM_MIN, _NORM_MAX = 1e-14, 1e17

# Whoever reads along is to find them in the core's own cache.
MOST_PIECES_ALONG = 2

_norm = torch.linalg.vector_norm


class Sketch(NamedTuple):
    """What is kept of a tensor. `value` is linear in the tensor, up to rounding in float64."""

    value: float
    norm: float
    nonfinite: int
    numel: int


def can_sketch(tensor: torch.Tensor) -> bool:
    """Whether `sketch` can read the tensor: strided or sparse COO, with memory behind it."""
    if tensor.is_sparse:
        return not tensor.is_meta
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        return False
    if type(tensor) not in PLAIN_TYPES:
        return plain_memory(tensor) is not None
    try:
        held = tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):
        return False  # vmapped and the like: no storage
    return tensor.numel() == 0 or held > tensor.storage_offset() * tensor.element_size()


Along = Callable[[int, int], None]


def sketch(tensor: torch.Tensor, along: Along | None = None) -> Sketch:
    """Sketch `tensor` as it is now, in the order of its rows whatever its strides; waits for a device.

    On CPU, `along` is told of each piece (first element, number of elements) once it has been read.
    """
    return sketch_where_it_lies(tensor, along) or _sketch_any(tensor, along)


def sketch_where_it_lies(tensor: torch.Tensor, along: Along | None = None) -> Sketch | None:
    """The short way, which nearly all gradients on a CPU can go; None: another way has to be found."""
    span = direct_span(tensor) if tensor.is_cpu else None
    if span is None:
        return None
    layout, address = span
    kernel = native_kernel(layout.dtype) if layout.by_rows else None
    if kernel is None:
        return None
    count = layout.numel
    if count > PIECE:
        return _sketch_native(kernel, tensor, count, along or _nobody)
    totals = NativeTotals()
    kernel.add(totals, address, 0, count)
    if along is not None:
        along(0, count)
    return _finished_native(tensor, count, totals)


def _sketch_any(tensor: torch.Tensor, along: Along | None) -> Sketch:
    tensor = bare(tensor)
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_sparse:
        from ddpcheck.probes.sketches.sparse import sketch_sparse

        return sketch_sparse(tensor)
    if not tensor.is_cpu:
        from ddpcheck.probes.sketches.batch import DeviceSketches

        page = DeviceSketches(tensor.device)
        page.add(0, tensor)
        return page.sketches()[0]
    return _sketch_cpu(as_real(tensor), tensor.numel(), along or _nobody)


def bare(tensor: torch.Tensor) -> torch.Tensor:
    """What can be sketched as a plain tensor: operations on a subclass would run the user's code."""
    if type(tensor) in PLAIN_TYPES or tensor.is_sparse:
        return tensor
    memory = plain_memory(tensor)
    return tensor if memory is None else memory


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """What the tensor stands for, a complex one as pairs of real numbers."""
    if tensor.is_conj() or tensor.is_neg():
        # torch warns whoever makes a complex32.
        dtype = torch.complex64 if tensor.dtype is torch.complex32 else tensor.dtype
        shown = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
        copy_serially(shown, tensor)
        tensor = shown
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _nobody(start: int, size: int) -> None:
    pass


def _sketch_cpu(tensor: torch.Tensor, numel: int, along: Along) -> Sketch:
    kernel = native_kernel(tensor.dtype)
    if kernel is None and tensor.dtype in _EXACT_IN_FLOAT32:
        kernel = native_kernel(torch.float32)
    if kernel is not None:
        return _sketch_native(kernel, tensor, numel, along)
    # Where torch has no threads to wake, fewer and larger pieces cost less.
    most = BLOCK if torch.get_num_threads() == 1 else PIECE
    work = _workspace(tensor.dtype)
    count = tensor.numel()
    if count <= most:
        value, norm = work.piece(tensor, 0, count) if count else (0.0, 0.0)
        along(0, count)
    else:
        value, norm = _sum_of_pieces(work, tensor, count, most, along)
    return _finished(tensor, numel, value, norm, most)


def _finished(tensor: torch.Tensor, numel: int, value: float, norm: float, most: int) -> Sketch:
    nonfinite = 0
    if not math.isfinite(value) or not math.isfinite(norm):
        tensor = tensor.detach()
        work, count = _workspace(tensor.dtype), tensor.numel()
        nonfinite = sum(work.nonfinite(piece, size) for _, piece, size in _pieces(tensor, count, most))
    return Sketch(value, norm, nonfinite, numel)


def _sketch_native(kernel: NativeKernel, tensor: torch.Tensor, numel: int, along: Along) -> Sketch:
    totals = NativeTotals()
    most = (MOST_PIECES if along is _nobody else MOST_PIECES_ALONG) * PIECE
    for start, address, size in _stretches(tensor, kernel, most):
        kernel.add(totals, address, start, size)
        along(start, size)
    return _finished_native(tensor, numel, totals)


def _finished_native(tensor: torch.Tensor, numel: int, totals: NativeTotals) -> Sketch:
    value, squares = totals.value_and_squares()
    return _finished(tensor, numel, value, math.sqrt(squares), PIECE)


def _stretches(tensor: torch.Tensor, kernel: NativeKernel, most: int) -> Iterator[tuple[int, int, int]]:
    """First element, address and size of one or several pieces, as the kernel can read them."""
    count = tensor.numel()
    if tensor.dtype is kernel.dtype and tensor.is_contiguous():
        base, itemsize = tensor.data_ptr(), tensor.element_size()
        for start in range(0, count, most):
            yield start, base + start * itemsize, min(most, count - start)
        return
    work = _workspace(tensor.dtype)
    for start, piece, size in _pieces(tensor, count, PIECE):
        yield start, (piece if piece.dtype is kernel.dtype else work.as_float32(piece, size)).data_ptr(), size


def _sum_of_pieces(
    work: _Workspace, tensor: torch.Tensor, count: int, most: int, along: Along
) -> tuple[float, float]:
    terms, norms = [], []
    for start, piece, size in _pieces(tensor, count, most):
        block, offset = divmod(start, BLOCK)
        value, norm = work.piece(piece, offset, size)
        along(start, size)
        terms.append(value * weight(block))
        norms.append(norm)
    return _total(terms), math.hypot(*norms)


def _total(terms: list[float]) -> float:
    # fsum refuses infinities of both signs.
    return math.fsum(terms) if all(map(math.isfinite, terms)) else sum(terms)


def _pieces(tensor: torch.Tensor, count: int, most: int) -> Iterator[tuple[int, torch.Tensor, int]]:
    """The tensor in pieces that count row by row, gathered into a buffer where it does not lie that way."""
    if tensor.is_contiguous():
        for index, piece in enumerate(torch.split(tensor.view(-1), most)):
            yield index * most, piece, piece.numel()
        return
    with torch.inference_mode(False):
        gathered = torch.empty(min(most, count), dtype=tensor.dtype, device="cpu")
    for start in range(0, count, most):
        size = min(most, count - start)
        gather(gathered[:size], tensor, start)
        yield start, gathered[:size], size


def gather(target: torch.Tensor, tensor: torch.Tensor, start: int) -> None:
    """Fill the flat `target` with the elements of `tensor` from number `start` on, counted row by row."""
    if tensor.dim() <= 1:
        target.copy_(tensor.reshape(-1)[start : start + target.numel()])
        return
    row_size = tensor.numel() // tensor.shape[0]
    filled, wanted = 0, target.numel()
    while filled < wanted:
        row, offset = divmod(start + filled, row_size)
        rows = (wanted - filled) // row_size
        if offset or not rows:
            size = min(row_size - offset, wanted - filled)
            gather(target[filled : filled + size], tensor[row], offset)
        else:
            size = rows * row_size
            target[filled : filled + size].view(rows, *tensor.shape[1:]).copy_(tensor[row : row + rows])
        filled += size


class _Workspace:
    """Buffers of one thread for one precision, small enough for a core's own cache.

    Everything of up to 32 bits is exact in float32, where a sign costs half as much as in float64. Only
    torch's own kernels are used: they stay on this thread below 32768 elements, a BLAS decides for itself
    (torch.dot started MKL's threads at 4096).
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        # Tensors made in inference mode could not be written to outside it.
        with torch.inference_mode(False):
            self._signed = torch.empty(BLOCK, dtype=dtype, device="cpu")
            self._wide = torch.empty(BLOCK, dtype=torch.float64, device="cpu")
        self._views: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def piece(self, piece: torch.Tensor, offset: int, size: int) -> tuple[float, float]:
        """Signed sum and norm of up to a block of elements that begin at `offset` of their block."""
        signed, wide, signs = self._views.get((offset, size)) or self._make_views(offset, size)
        if piece.dim() != 1:
            piece = piece.reshape(-1)
        if piece.dtype is not self._dtype or not piece.is_contiguous():
            signed.copy_(piece)
            piece = signed
        # The norm first: of all kernels it streams best from memory, the others then find the piece in the cache.
        norm = _norm(piece).item()
        torch.mul(piece, signs, out=signed)
        if self._dtype is torch.float64:
            return signed.sum().item(), norm
        wide.copy_(signed)
        if not _NORM_MIN < norm < _NORM_MAX:
            norm = _norm(wide).item()
        return wide.sum().item(), norm

    def as_float32(self, piece: torch.Tensor, size: int) -> torch.Tensor:
        """A copy in the buffer, of what is exact in it."""
        shown = self._signed[:size]
        shown.copy_(piece)
        return shown

    def nonfinite(self, piece: torch.Tensor, size: int) -> int:
        wide = self._wide[:size]
        wide.copy_(piece.reshape(-1))
        return size - int(torch.isfinite(wide).sum().item())

    def _make_views(self, offset: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if len(self._views) >= 4096:
            self._views.clear()  # sizes that change with every batch must not pile up
        signs = sign_table(self._dtype, torch.device("cpu"))[offset : offset + size]
        views = self._views[offset, size] = self._signed[:size], self._wide[:size], signs
        return views


@cache
def sign_table(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.tensor(signs(), dtype=dtype, device=device)


class _Workspaces(threading.local):
    def __init__(self) -> None:
        self.narrow: _Workspace | None = None
        self.wide: _Workspace | None = None


_workspaces = _Workspaces()
# Integers may have more digits than float32 holds.
_EXACT_IN_FLOAT32 = frozenset(
    {torch.float32, torch.bfloat16, torch.float16}
    | {getattr(torch, name) for name in dir(torch) if name.startswith("float8_")}
)


def _workspace(dtype: torch.dtype) -> _Workspace:
    if dtype in _EXACT_IN_FLOAT32:
        if _workspaces.narrow is None:
            _workspaces.narrow = _Workspace(torch.float32)
        return _workspaces.narrow
    if _workspaces.wide is None:
        _workspaces.wide = _Workspace(torch.float64)
    return _workspaces.wide
