"""Makes torch's own compiler generate kernels for the simulated accelerator, and capture them for `reduce-overhead`.

The kernels are the C++ that inductor generates for a CPU; each one is launched on the current stream. Everything before
them is inductor's: tracing, cutting graphs at DDP's buckets, fusion, planning of buffers, the wrapper around kernels.
`mode="reduce-overhead"` hands compiled graphs to a policy for graphs. Torch's default policy, its trees of CUDA graphs,
calls the allocator of CUDA, so `GraphPolicy` takes its place: it captures with the device's own graphs.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tests.accelerator.build import BUILDS
from tests.accelerator.device import TYPE, native

# As torch's trees do it: a graph runs once as it is, and is captured at its second call.
WARM_CALLS = 1
# How often kernels were launched, and graphs captured and replayed, in this process.
calls: Counter[str] = Counter()


def is_supported() -> bool:
    """Earlier versions of torch have no policy for graphs."""
    from torch._inductor import config

    return hasattr(config, "cudagraph_policy")


def install() -> None:
    """Register inductor's code generation for the device, and the policy."""
    from torch._dynamo.device_interface import CpuInterface, register_interface_for_device
    from torch._inductor import config, cudagraph_utils
    from torch._inductor.codegen import common
    from torch._inductor.codegen.cpp import CppScheduling
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
    from torch._inductor.codegen.cpu_device_op_overrides import CpuDeviceOpOverrides
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    # Compiled once for all processes, like the device itself.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(BUILDS / "inductor"))
    register_interface_for_device(TYPE, CpuInterface)
    _launch_kernels_on_device()
    common.register_backend_for_device(TYPE, CppScheduling, PythonWrapperCodegen, CppWrapperCpu)
    common.register_device_op_overrides(TYPE, CpuDeviceOpOverrides())
    refusal = cudagraph_utils.check_lowering_disable_cudagraph

    def why_not_captured(nodes: dict[torch.device, Any]) -> str | None:
        """Torch refuses every device but CUDA."""
        return None if {device.type for device in nodes} == {TYPE} else refusal(nodes)

    cudagraph_utils.check_lowering_disable_cudagraph = why_not_captured
    config.cudagraph_policy = _policy()
    config.compile_threads = 1
    # Inductor's C++ has neither; it asks whether the device is the CPU.
    config.loop_ordering_after_fusion = config.loop_reindexing_after_fusion = False


def launch(kernel: Callable[..., None], *arguments: Any) -> None:
    """What the generated code calls for each kernel."""
    calls["kernels"] += 1
    native.launch_call("inductor", kernel, arguments)


def _launch_kernels_on_device() -> None:
    """Inductor's wrapper around kernels knows how CUDA, XPU and the CPU call them, and refuses all others."""
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    wrapper: Any = PythonWrapperCodegen
    write_header, call_kernel = wrapper.write_header, wrapper._generate_kernel_call_helper

    def write_header_with_launch(self: Any) -> None:
        write_header(self)
        self.header.writeline(f"from {__name__} import launch as launch_on_device")

    def call_kernel_on_device(
        self: Any, name: str, arguments: Sequence[str], *, device: torch.device, **options: Any
    ) -> None:
        if device.type == TYPE:
            self.writeline(self.wrap_kernel_call("launch_on_device", [name, *arguments]))
        else:
            call_kernel(self, name, arguments, device=device, **options)

    wrapper.write_header, wrapper._generate_kernel_call_helper = (
        write_header_with_launch,
        call_kernel_on_device,
    )


def _policy() -> Any:
    from torch._inductor.cudagraph_utils import CUDAGraphPolicy

    class GraphPolicy(CUDAGraphPolicy):
        def cudagraphify(
            self,
            model: Callable[[list[Any]], Any],
            example_inputs: Sequence[Any],
            static_input_idxs: Sequence[int],
            **options: Any,
        ) -> Any:
            return CapturedGraph(model, frozenset(static_input_idxs))

    return GraphPolicy()


class CapturedGraph:
    """One compiled forward or backward. What stays in its place, as parameters do and what a graph has saved for its
    backward, is read there; other inputs are copied before each replay.
    """

    def __init__(self, model: Callable[[list[Any]], Any], static: frozenset[int]) -> None:
        self._model = model
        self._static = static
        self._calls = 0
        self._graph: Any = None
        self._inputs: list[Any] = []
        self._addresses: Mapping[int, int] = {}
        self._outputs: Sequence[Any] = ()

    def __call__(self, inputs: list[Any]) -> Any:
        self._calls += 1
        if self._calls <= WARM_CALLS:
            return self._model(inputs)
        values = list(inputs)
        # As the compiled function does: the caller's list must not keep activations alive.
        inputs.clear()
        if self._graph is None or self._addresses != self._static_addresses(values):
            self._capture(values)
        for index, (own, value) in enumerate(zip(self._inputs, values, strict=True)):
            if index not in self._static and isinstance(value, torch.Tensor):
                own.copy_(value)
        self._graph.replay()
        calls["replays"] += 1
        # In the memory of the graph, as with torch's trees: the next replay overwrites it.
        return [each.detach() if isinstance(each, torch.Tensor) else each for each in self._outputs]

    def _static_addresses(self, values: Sequence[Any]) -> dict[int, int]:
        return {
            index: value.data_ptr()
            for index, value in enumerate(values)
            if index in self._static and isinstance(value, torch.Tensor)
        }

    def _capture(self, values: Sequence[Any]) -> None:
        self._addresses = self._static_addresses(values)
        self._inputs = [
            value.clone() if isinstance(value, torch.Tensor) and index not in self._static else value
            for index, value in enumerate(values)
        ]
        self._graph = torch.sim.SimGraph()  # type: ignore[attr-defined]
        with torch.sim.graph(self._graph):  # type: ignore[attr-defined]
            self._outputs = self._model(list(self._inputs))
        calls["captures"] += 1
