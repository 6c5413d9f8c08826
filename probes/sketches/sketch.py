"""The sketch of one tensor: its sum under fixed random signs, its norm, its count of non-finite values."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch

from ddpcheck import torch_compat
from ddpcheck.probes.digest.flatten import plain_memory
from ddpcheck.probes.digest.tensor_bytes import PLAIN_TYPES, copy_serially, direct_span
from ddpcheck.probes.scan.library import MAX_PIECES, NativeKernel, NativeTotals, native_kernel
from ddpcheck.records.sketch_signs import BLOCK, PIECE, signs, weight

# Between these limits the norm is accurate to 1 in 10,000 in float32: no overflow, no relevant underflow.
_NORM_MIN, _NORM_MAX = 1e-14, 1e17

_norm = torch.linalg.vector_norm


class Sketch(NamedTuple):
    """The statistics of one tensor. `value` is linear in the tensor, up to rounding in float64."""

    value: float
    norm: float
    nonfinite: int
    numel: int


def can_sketch(tensor: torch.Tensor) -> bool:
    """Whether `sketch` can read the tensor: strided or sparse COO, with memory."""
    if tensor.is_sparse:
        return not tensor.is_meta and torch_compat.gives_sparse_parts()
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        return False
    if type(tensor) not in PLAIN_TYPES:
        return plain_memory(tensor) is not None
    try:
        storage_bytes = tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):
        return False  # vmapped and similar tensors: no storage
    if tensor.numel() == 0:
        return True
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return storage_bytes >= (tensor.storage_offset() + last + 1) * tensor.element_size()


def sketch(tensor: torch.Tensor) -> Sketch:
    """Sketch `tensor` as it is now, in row-major order whatever its strides; waits for a device."""
    return _sketch_in_place(tensor) or _sketch_any(tensor)


def _sketch_in_place(tensor: torch.Tensor) -> Sketch | None:
    """The fast path, which works for nearly all gradients on a CPU; None: use the general one."""
    span = direct_span(tensor) if tensor.is_cpu else None
    if span is None:
        return None
    layout, address = span
    kernel = native_kernel(layout.dtype) if layout.by_rows else None
    if kernel is None:
        return None
    count = layout.numel
    if count > PIECE:
        return _sketch_native(kernel, tensor, count)
    totals = NativeTotals()
    kernel.add(totals, address, 0, count)
    return _finished_native(tensor, count, totals)


def _sketch_any(tensor: torch.Tensor) -> Sketch:
    tensor = bare(tensor)
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_sparse:
        return _sketch_sparse(tensor)
    if not tensor.is_cpu:
        from ddpcheck.probes.sketches.batch import DeviceSketches

        queued = DeviceSketches(tensor.device)
        queued.add(0, tensor)
        return queued.sketches()[0]
    return _sketch_cpu(as_real(tensor), tensor.numel())


def bare(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a subclass as a plain tensor: operations on a subclass would run the user's code."""
    if type(tensor) in PLAIN_TYPES or tensor.is_sparse:
        return tensor
    memory = plain_memory(tensor)
    return tensor if memory is None else memory


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """The values of the tensor with conjugate and negative bits resolved, a complex one as pairs of real numbers."""
    if tensor.is_conj() or tensor.is_neg():
        # torch warns when a complex32 tensor is made.
        dtype = torch.complex64 if tensor.dtype is torch.complex32 else tensor.dtype
        resolved = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
        copy_serially(resolved, tensor)
        tensor = resolved
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _sketch_cpu(tensor: torch.Tensor, numel: int) -> Sketch:
    kernel = native_kernel(tensor.dtype)
    if kernel is None and tensor.dtype in EXACT_IN_FLOAT32:
        kernel = native_kernel(torch.float32)
    if kernel is not None:
        return _sketch_native(kernel, tensor, numel)
    # If torch uses one thread, fewer and larger pieces are faster.
    piece_size = BLOCK if torch.get_num_threads() == 1 else PIECE
    work = _workspace(tensor.dtype)
    count = tensor.numel()
    if count <= piece_size:
        value, norm = work.piece(tensor, 0, count) if count else (0.0, 0.0)
    else:
        value, norm = _sum_of_pieces(work, tensor, count, piece_size)
    return _finished(tensor, numel, value, norm, piece_size)


def _finished(tensor: torch.Tensor, numel: int, value: float, norm: float, piece_size: int) -> Sketch:
    nonfinite = 0
    if not math.isfinite(value) or not math.isfinite(norm):
        tensor = tensor.detach()
        work, count = _workspace(tensor.dtype), tensor.numel()
        nonfinite = sum(work.nonfinite(piece, size) for _, piece, size in _pieces(tensor, count, piece_size))
    return Sketch(value, norm, nonfinite, numel)


def _sketch_native(kernel: NativeKernel, tensor: torch.Tensor, numel: int) -> Sketch:
    totals = NativeTotals()
    for start, address, size in _readable_pieces(tensor, kernel, MAX_PIECES * PIECE):
        kernel.add(totals, address, start, size)
    return _finished_native(tensor, numel, totals)


def _finished_native(tensor: torch.Tensor, numel: int, totals: NativeTotals) -> Sketch:
    value, squares = totals.value_and_squares()
    return _finished(tensor, numel, value, math.sqrt(squares), PIECE)


def _readable_pieces(
    tensor: torch.Tensor, kernel: NativeKernel, piece_size: int
) -> Iterator[tuple[int, int, int]]:
    """First element, address and size of one or several pieces, in a form that the kernel can read."""
    count = tensor.numel()
    if tensor.dtype is kernel.dtype and tensor.is_contiguous():
        base, itemsize = tensor.data_ptr(), tensor.element_size()
        for start in range(0, count, piece_size):
            yield start, base + start * itemsize, min(piece_size, count - start)
        return
    work = _workspace(tensor.dtype)
    for start, piece, size in _pieces(tensor, count, PIECE):
        yield start, (piece if piece.dtype is kernel.dtype else work.as_float32(piece, size)).data_ptr(), size


def _sum_of_pieces(
    work: _Workspace, tensor: torch.Tensor, count: int, piece_size: int
) -> tuple[float, float]:
    terms, norms = [], []
    for start, piece, size in _pieces(tensor, count, piece_size):
        block, offset = divmod(start, BLOCK)
        value, norm = work.piece(piece, offset, size)
        terms.append(value * weight(block))
        norms.append(norm)
    return _total(terms), math.hypot(*norms)


def _total(terms: list[float]) -> float:
    # fsum raises on infinities of both signs.
    return math.fsum(terms) if all(map(math.isfinite, terms)) else sum(terms)


def _pieces(tensor: torch.Tensor, count: int, piece_size: int) -> Iterator[tuple[int, torch.Tensor, int]]:
    """The tensor in row-major pieces, gathered into a buffer if its memory has another order."""
    if tensor.is_contiguous():
        for index, piece in enumerate(torch.split(tensor.view(-1), piece_size)):
            yield index * piece_size, piece, piece.numel()
        return
    with torch.inference_mode(False):
        gathered = torch.empty(min(piece_size, count), dtype=tensor.dtype, device="cpu")
    for start in range(0, count, piece_size):
        size = min(piece_size, count - start)
        gather(gathered[:size], tensor, start)
        yield start, gathered[:size], size


def gather(target: torch.Tensor, tensor: torch.Tensor, start: int) -> None:
    """Fill the flat `target` with the elements of `tensor` from index `start` on, in row-major order."""
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
    """Buffers of one thread for one precision, small enough for the core's own cache.

    All floats of up to 32 bits are exact in float32, where a sign costs half as much as in float64. Only kernels of
    torch itself are used: they stay on this thread below 32768 elements, while a BLAS decides for itself (torch.dot
    started the threads of MKL at 4096).
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        # Tensors made in inference mode cannot be written to outside it.
        with torch.inference_mode(False):
            self._signed = torch.empty(BLOCK, dtype=dtype, device="cpu")
            self._wide = torch.empty(BLOCK, dtype=torch.float64, device="cpu")
        self._views: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def piece(self, piece: torch.Tensor, offset: int, size: int) -> tuple[float, float]:
        """Signed sum and norm of up to one block of elements that begin at `offset` in their block."""
        signed, wide, signs = self._views.get((offset, size)) or self._make_views(offset, size)
        if piece.dim() != 1:
            piece = piece.reshape(-1)
        if piece.dtype is not self._dtype or not piece.is_contiguous():
            signed.copy_(piece)
            piece = signed
        # The norm first: it streams fastest from memory, and the other kernels then find the piece in the cache.
        norm = _norm(piece).item()
        torch.mul(piece, signs, out=signed)
        if self._dtype is torch.float64:
            return signed.sum().item(), norm
        wide.copy_(signed)
        if not _NORM_MIN < norm < _NORM_MAX:
            norm = _norm(wide).item()
        return wide.sum().item(), norm

    def as_float32(self, piece: torch.Tensor, size: int) -> torch.Tensor:
        """A copy in the buffer; exact for the dtypes of EXACT_IN_FLOAT32."""
        copy = self._signed[:size]
        copy.copy_(piece)
        return copy

    def nonfinite(self, piece: torch.Tensor, size: int) -> int:
        wide = self._wide[:size]
        wide.copy_(piece.reshape(-1))
        return size - int(torch.isfinite(wide).sum().item())

    def _make_views(self, offset: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if len(self._views) >= 4096:
            self._views.clear()  # bounds memory when sizes change with every batch
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
# Not integers: they may have more digits than float32 holds.
EXACT_IN_FLOAT32 = frozenset(
    {torch.float32, torch.bfloat16, torch.float16}
    | {getattr(torch, name) for name in dir(torch) if name.startswith("float8_")}
)


def _workspace(dtype: torch.dtype) -> _Workspace:
    if dtype in EXACT_IN_FLOAT32:
        if _workspaces.narrow is None:
            _workspaces.narrow = _Workspace(torch.float32)
        return _workspaces.narrow
    if _workspaces.wide is None:
        _workspaces.wide = _Workspace(torch.float64)
    return _workspaces.wide


def _sketch_sparse(tensor: torch.Tensor) -> Sketch:
    """The sketch of the equivalent dense tensor, without making one. Duplicate entries are summed in float64."""
    rows, values = _summed_entries(tensor.detach())
    width = values.shape[1]
    terms, norms, nonfinite = [], [0.0], 0
    for start, stop in _row_slices(len(rows), width):
        piece = values[start:stop]
        value, norm = _sketch_entries(rows[start:stop], piece, width)
        terms.append(value)
        norms.append(norm)
        if not math.isfinite(value) or not math.isfinite(norm):
            nonfinite += piece.numel() - int(torch.isfinite(piece).sum().item())
    return Sketch(sum(terms), math.hypot(*norms), nonfinite, tensor.numel())


def _summed_entries(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of the non-empty rows, ascending, and their values in float64, one row each.

    A row is the span of the dense dimensions: one element if there are none. Complex elements are pairs.
    """
    parts = torch_compat.sparse_parts(tensor)
    if parts is None:
        raise TypeError("this torch gives no access to the entries of a sparse tensor")
    indices, values = parts[0], as_real(parts[1]).double()
    row_indices = torch.zeros(indices.shape[1], dtype=torch.int64, device=indices.device)
    for dim in range(indices.shape[0]):
        row_indices = row_indices * tensor.shape[dim] + indices[dim]
    width = math.prod(values.shape[1:])
    values = values.reshape(len(row_indices), width)
    if tensor.is_coalesced():
        return row_indices, values
    rows, inverse = torch.unique(row_indices, return_inverse=True)
    summed = torch.zeros((len(rows), width), dtype=torch.float64, device=values.device)
    return rows, summed.index_add_(0, inverse, values)


def _sketch_entries(rows: torch.Tensor, values: torch.Tensor, width: int) -> tuple[float, float]:
    positions = rows.unsqueeze(1) * width + torch.arange(width, device=rows.device)
    blocks = (positions // BLOCK).flatten()
    signed = values * sign_table(torch.float64, values.device)[positions % BLOCK]
    used, inverse = torch.unique_consecutive(blocks, return_inverse=True)
    by_block = [weight(block) for block in used.tolist()]
    weights = torch.tensor(by_block, dtype=torch.float64, device=rows.device)
    value = (signed.flatten() * weights[inverse]).sum().item()
    return value, _norm(signed).item()


def _row_slices(rows: int, width: int) -> list[tuple[int, int]]:
    step = max(1, PIECE // max(width, 1))
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]
