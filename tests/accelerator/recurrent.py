"""The fused LSTM cell, which torch takes on every accelerator, from operators that the fallback to the CPU has."""

from __future__ import annotations

import torch

Tensor = torch.Tensor
_libraries: list[torch.library.Library] = []


def _forward(
    igates: Tensor,
    hgates: Tensor,
    cx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    gates = igates + hgates
    for bias in (input_bias, hidden_bias):
        if bias is not None:
            gates = gates + bias
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat((i, f, g, o), 1)


def _backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    i, f, g, o = workspace.chunk(4, 1)
    squashed = cy.tanh()
    grad_hy = torch.zeros_like(cy) if grad_hy is None else grad_hy
    grad = grad_hy * o * (1 - squashed * squashed)
    if grad_cy is not None:
        grad = grad + grad_cy
    gates = torch.cat(
        (
            grad * g * i * (1 - i),
            grad * cx * f * (1 - f),
            grad * i * (1 - g * g),
            grad_hy * squashed * o * (1 - o),
        ),
        1,
    )
    return gates, grad * f, gates.sum(0) if has_bias else None


def register() -> None:
    library = torch.library.Library("aten", "IMPL")
    library.impl("_thnn_fused_lstm_cell", _forward, "PrivateUse1")
    library.impl("_thnn_fused_lstm_cell_backward_impl", _backward, "PrivateUse1")
    # Its functions are registered for as long as it exists.
    _libraries.append(library)
