"""A few values of each tensor, by position: comparable across dtypes, memory formats and devices, unlike a digest."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ddpcheck import torch_compat
from ddpcheck.probes.digest.device_copy import HostCopy, copy_to_host
from ddpcheck.probes.digest.flatten import is_supported
from ddpcheck.probes.digest.tensor_bytes import PLAIN_TYPES

# Values taken of one tensor, and of its first dimension if it has several.
MOST_VALUES = 128
MOST_ROWS = 16
# A tensor with fewer distinct values, such as a bias of zeros, identifies nothing.
MIN_DISTINCT = 4
# Types that a value may have passed through on its way from a file to a parameter.
_NARROW = (torch.bfloat16, torch.float16)


class SampledValues:
    """Values of several tensors; complete when their copies from devices have arrived."""

    def __init__(
        self,
        on_host: list[torch.Tensor | None],
        pending: list[tuple[HostCopy, list[int], list[torch.Tensor]]],
    ) -> None:
        self._values = on_host
        # For each copy, the indices of its tensors, and empty tensors with their dtype and shape.
        self._pending = pending

    def ready(self) -> bool:
        return all(copy.ready() for copy, _, _ in self._pending)

    def result(self) -> list[torch.Tensor | None]:
        """By tensor: its sampled values on the host; None where they cannot be read."""
        for copy, indices, templates in self._pending:
            data, offset = copy.tensor().reshape(-1), 0
            for index, template in zip(indices, templates, strict=True):
                size = template.numel() * template.element_size()
                # Cloned, so that the values are aligned for their dtype.
                piece = data[offset : offset + size].clone()
                self._values[index] = piece.view(template.dtype).reshape(template.shape)
                offset += size
        self._pending = []
        return self._values


def sample_values(tensors: Sequence[torch.Tensor]) -> SampledValues:
    """Start to read the values that the tensors have now."""
    on_host: list[torch.Tensor | None] = [None] * len(tensors)
    devices: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    with torch_compat.no_torch_function(), torch.no_grad():
        for index, tensor in enumerate(tensors):
            if not _is_readable(tensor):
                continue
            view = _downsampled(tensor)
            if tensor.is_cpu:
                on_host[index] = view.clone(memory_format=torch.contiguous_format)
            else:
                devices.setdefault(tensor.device, []).append((index, view))
        pending = []
        for of_device in devices.values():
            pieces = [view.contiguous() for _, view in of_device]
            data = torch.cat([piece.reshape(-1).view(torch.uint8) for piece in pieces])
            templates = [torch.empty(piece.shape, dtype=piece.dtype, device="meta") for piece in pieces]
            pending.append((copy_to_host(data.view(1, -1)), [index for index, _ in of_device], templates))
    return SampledValues(on_host, pending)


def _is_readable(tensor: torch.Tensor) -> bool:
    plain = type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided and not tensor.is_meta
    return plain and not tensor.is_quantized and not tensor.is_complex() and is_supported(tensor)


def _downsampled(tensor: torch.Tensor) -> torch.Tensor:
    """Every n-th element along each dimension: the same elements whatever the strides."""
    view, left = tensor.detach().resolve_neg(), MOST_VALUES
    for dim, size in enumerate(tensor.shape):
        keep = max(1, min(size, MOST_ROWS if dim == 0 and tensor.dim() > 1 else left))
        index = (slice(None),) * dim + (slice(None, None, max(1, -(-size // keep))),)
        view = view[index]
        left = max(1, left // keep)
    return view


def is_distinctive(values: torch.Tensor | None) -> bool:
    """Whether the values identify a tensor. Single numbers and constants do not."""
    return values is not None and len(set(values.reshape(-1).tolist())) >= MIN_DISTINCT


def are_equal(stored: torch.Tensor, held: torch.Tensor) -> bool:
    return stored.dtype == held.dtype and stored.shape == held.shape and _same(stored, held)


def are_cast(stored: torch.Tensor, held: torch.Tensor) -> bool:
    """Whether `held` are the stored values after a conversion of their dtype."""
    if stored.shape != held.shape or not (stored.is_floating_point() and held.is_floating_point()):
        return False
    ways = [stored, *(stored.to(narrow) for narrow in _NARROW)]
    return any(_same(way.to(held.dtype), held) for way in ways)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    # Not by bytes: -0.0 is 0.0 after some conversions.
    return torch.equal(one, other) or (
        one.is_floating_point() and bool(torch.isclose(one, other, rtol=0, atol=0, equal_nan=True).all())
    )


def correlation(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float | None:
    """Of the stored values and those held, over all tensors; None if there are too few values."""
    total, one_square, other_square, count = 0.0, 0.0, 0.0, 0
    for stored, held in pairs:
        if stored.shape != held.shape or not stored.is_floating_point():
            continue
        one, other = (values.double() - values.double().mean() for values in (stored, held))
        total += float((one * other).sum())
        one_square += float(one.square().sum())
        other_square += float(other.square().sum())
        count += one.numel()
    norm = (one_square * other_square) ** 0.5
    return total / norm if count >= MOST_VALUES and norm > 0 else None
