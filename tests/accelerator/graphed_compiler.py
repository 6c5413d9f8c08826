"""A backend of torch.compile that captures compiled graphs and replays them, as `mode="reduce-overhead"` does.

The first calls of a graph run its operators, the next one captures them, and all later ones copy their inputs to the
memory of the captured ones and replay. It happens inside of forwards and backwards of the program, where the hooks of
DDP and of ddpcheck are. What is missing of torch's own trees of graphs is shared memory between graphs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

WARM_CALLS = 2
# How often graphs were captured and replayed in this process.
calls: Counter[str] = Counter()


class GraphedFunction:
    """One compiled forward or backward."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        self._module = module
        self._calls = 0
        self._graph: Any = None
        self._inputs: list[Any] = []
        self._outputs: Any = ()

    def __call__(self, *inputs: Any) -> Any:
        self._calls += 1
        if self._calls <= WARM_CALLS:
            return self._module(*inputs)
        if self._graph is None:
            self._capture(inputs)
        for static, value in zip(self._inputs, inputs, strict=True):
            if isinstance(value, torch.Tensor):
                static.copy_(value)
        self._graph.replay()
        calls["replays"] += 1
        # The next replay writes to the same memory.
        return [each.clone() if isinstance(each, torch.Tensor) else each for each in self._outputs]

    def _capture(self, values: tuple[Any, ...]) -> None:
        self._inputs = [each.clone() if isinstance(each, torch.Tensor) else each for each in values]
        self._graph = torch.sim.SimGraph()  # type: ignore[attr-defined]
        with torch.sim.graph(self._graph):  # type: ignore[attr-defined]
            self._outputs = self._module(*self._inputs)
        calls["captures"] += 1


def backend() -> Callable[..., Any]:
    from torch._dynamo.backends.common import aot_autograd

    def compiled(module: torch.fx.GraphModule, inputs: list[Any]) -> GraphedFunction:
        return GraphedFunction(module)

    made: Callable[..., Any] = aot_autograd(fw_compiler=compiled, bw_compiler=compiled)
    return made
