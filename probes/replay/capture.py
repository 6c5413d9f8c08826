"""Captures one micro-batch of this rank: the module's inputs and state, and the gradients of its outputs.

The gradient of a loss with respect to the module's outputs is all that the rest of the program contributes to the local
gradients. With it, another rank computes them from the same inputs without knowing the loss. Parameters that the loss
also reaches on other ways, such as a penalty on the weights, are found in the graph and left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ddpcheck import torch_compat
from ddpcheck.probes.digest import combine
from ddpcheck.probes.digest.submit import submit
from ddpcheck.probes.replay.module_state import pack_attributes, pack_autocast, pack_generators
from ddpcheck.probes.replay.payload import (
    ALIGNMENT,
    DTYPES,
    NotPortableError,
    Packer,
    TensorSpan,
    TooLargeError,
    write_payload,
)
from ddpcheck.records.reasons import AuditSkip

if TYPE_CHECKING:
    from ddpcheck.agent.tracked_module import TrackedModule
    from ddpcheck.probes.digest import DigestFuture


class CaptureEntries(NamedTuple):
    """The hooks of captures as entry points of the probe: each is called with the capture."""

    inputs: Callable[..., None]
    outputs: Callable[..., None]
    gradient: Callable[..., None]


# Nodes of a graph outside of the module that are searched for other ways to its parameters.
_MAX_NODES = 1_000_000
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_OWN_HOOKS = ("torch.", "ddpcheck.")


def why_not_auditable(tracked: TrackedModule, module: torch.nn.Module) -> AuditSkip | None:
    """Why a forward of this module cannot be repeated without an effect on the program; None: it can."""
    if torch_compat.compiler_in_use():
        return AuditSkip.COMPILED
    if tracked.ignored:
        # They may differ between ranks.
        return AuditSkip.IGNORED_PARAMETERS
    if getattr(tracked.ddp(), "mixed_precision", None) is not None:
        return AuditSkip.MIXED_PRECISION
    if torch_compat.in_function_mode():
        return AuditSkip.FUNCTION_MODES
    for hooks in map(torch_compat.lookup, torch_compat.GLOBAL_MODULE_HOOKS):
        if any(map(_is_of_program, (hooks or {}).values())):
            return AuditSkip.MODULE_HOOKS
    for child in module.modules():
        if isinstance(child, torch.jit.ScriptModule):
            return AuditSkip.SCRIPTED
        if isinstance(child, torch.nn.SyncBatchNorm):
            return AuditSkip.COLLECTIVES
        for private in torch_compat.MODULE_HOOKS:
            if any(map(_is_of_program, torch_compat.read(private, child, {}).values())):
                return AuditSkip.MODULE_HOOKS
    tensors = [*tracked.parameter_tensors(), *module.parameters(), *module.buffers()]
    if any(type(each) not in _PLAIN_TYPES or each.layout is not torch.strided for each in tensors):
        return AuditSkip.TENSOR_TYPES
    return None


def _is_of_program(hook: Any) -> bool:
    """Whether a hook is neither of torch, such as the one of weight_norm, nor of ddpcheck."""
    name = getattr(hook, "__module__", None) or type(hook).__module__
    return not str(name).startswith(_OWN_HOOKS)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in the outputs of a module, in an order that follows from their structure."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for each in dataclasses.fields(value):
            yield from tensors_in(getattr(value, each.name, None))


def digest_outputs(outputs: Sequence[torch.Tensor]) -> DigestFuture:
    """Of values alone: strides may follow from how an operator was called."""
    return submit([each.detach().contiguous() for each in outputs])


class Capture:
    """One micro-batch, from the start of its forward to the start of its backward."""

    def __init__(
        self,
        tracked: TrackedModule,
        module: torch.nn.Module,
        devices: list[torch.device],
        entries: CaptureEntries,
    ) -> None:
        self.skip: AuditSkip | None = None
        self.outputs: DigestFuture | None = None
        # Indices of parameters that are not compared.
        self.excluded: set[int] = set()
        # Those of autocast, where it is on.
        self.autocast_dtypes: set[torch.dtype] = set()
        # A digest of the parameters, and their versions: a replay needs the values of this forward.
        self.parameters = ""
        self.versions: list[int] = []
        self.default_device = torch_compat.default_device()
        self._tracked = tracked
        self._devices = devices
        self._entries = entries
        self._depth = 0
        self._packer = Packer()
        self._content: dict[str, Any] = {}
        self._zeros: list[bool] = []
        # The node of each output that has a gradient, by its position among the tensors of the outputs.
        self._nodes: dict[int, Any] = {}
        self._gradients: dict[int, TensorSpan] = {}
        # Those that the loss uses itself.
        self._reached: set[int] = set()
        self._searched = False
        self._written = False
        self._handles: list[Any] = []
        parameters = tracked.parameter_tensors()
        self._read_earlier_gradients(parameters)
        self._exclude_hooked(parameters)
        if self.skip is None:
            self._handles = [
                module.register_forward_pre_hook(
                    partial(entries.inputs, self), prepend=True, with_kwargs=True
                ),
                module.register_forward_hook(partial(entries.outputs, self)),
            ]

    def end_forward(self) -> None:
        """Remove the hooks on the module."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _read_earlier_gradients(self, parameters: Sequence[torch.Tensor]) -> None:
        """Gradients are accumulated: only those that begin without any, or with zeros, are those of this backward."""
        gradients = [parameter.grad for parameter in parameters]
        self._zeros = [gradient is not None for gradient in gradients]
        # This waits for a device.
        if any(gradient is not None and bool(gradient.detach().count_nonzero()) for gradient in gradients):
            self.skip = AuditSkip.EARLIER_GRADIENTS

    def _exclude_hooked(self, parameters: Sequence[torch.Tensor]) -> None:
        """Gradients that hooks of the program may change, and sparse ones."""
        self.excluded |= self._tracked.sparse_parameters()
        for index, parameter in enumerate(parameters):
            before = torch_compat.read(torch_compat.TENSOR_HOOKS, parameter) or {}
            after = torch_compat.read(torch_compat.POST_ACCUMULATE_HOOKS, parameter) or {}
            if before or any(map(_is_of_program, after.values())):
                self.excluded.add(index)

    def on_inputs(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth += 1
        if self._depth > 1 or self.skip is not None:
            return
        packer = self._packer
        parameters = self._tracked.parameter_tensors()
        self.versions = torch_compat.tensor_versions(parameters)
        # This waits for a device.
        self.parameters = combine(submit([each.detach() for each in parameters]).result()).hex()
        try:
            self._content = {
                "parameters": self.parameters,
                "arguments": packer.value([args, kwargs]),
                "attributes": pack_attributes(module, packer),
                "generators": pack_generators(packer, self._devices),
                "autocast": pack_autocast(self._devices),
                "alignments": [parameter.data_ptr() % ALIGNMENT for parameter in parameters],
                "zeros": self._zeros,
            }
        except NotPortableError:
            self.skip = AuditSkip.INPUTS
        except TooLargeError:
            self.skip = AuditSkip.SIZE
        else:
            self.autocast_dtypes = {
                DTYPES[dtype] for enabled, dtype, _ in self._content["autocast"].values() if enabled
            }
        packer.release()

    def on_outputs(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._depth -= 1
        if self._depth or self.skip is not None:
            return
        outputs = list(tensors_in(output))
        self.outputs = digest_outputs(outputs)
        for index, tensor in enumerate(outputs):
            if tensor.requires_grad and tensor.grad_fn is not None:
                self._nodes[index] = tensor.grad_fn
                register: Any = tensor.register_hook
                register(self._gradient_hook(index))
        if not self._nodes:
            self.skip = AuditSkip.OUTPUTS

    def _gradient_hook(self, index: int) -> Callable[..., None]:
        return lambda gradient: self._entries.gradient(self, index, gradient)

    def on_gradient(self, index: int, gradient: torch.Tensor) -> None:
        """The gradient of an output; the probe makes it an entry point."""
        if self._written or index in self._gradients:
            self.skip = self.skip or AuditSkip.SEVERAL_BACKWARDS
            return
        try:
            self._gradients[index] = TensorSpan(gradient)
        except NotPortableError:
            self.skip = AuditSkip.OUTPUTS
        except TooLargeError:
            self.skip = AuditSkip.SIZE

    def backward_called(self, root: Any) -> None:
        """Find the parameters that the loss also reaches without passing through the module's outputs."""
        if self._written or self.skip is not None or not self._nodes:
            return
        # Of an earlier call for other gradients, such as torch.autograd.grad.
        self._gradients.clear()
        roots = [root] if isinstance(root, torch.Tensor) else list(root) if _is_sequence(root) else []
        self._searched = bool(roots)
        known = {id(each): index for index, each in enumerate(self._tracked.parameter_tensors())}
        search = search_graph(roots, set(self._nodes.values()), known)
        if search is None or len(search.parameters | self.excluded) == len(known):
            self.skip = AuditSkip.OTHER_PATHS
        else:
            self._reached = {index for index, node in self._nodes.items() if node in search.stops}
            self.excluded |= search.parameters

    def write(self, path: Path, identity: Mapping[str, Any]) -> int:
        """The backward has begun: hand everything over. Returns the size of the file; 0: there is none."""
        if self._written or self.skip is not None:
            return 0
        self._written = True
        # An output from which another one was computed gets a gradient from inside the module too. The replay computes
        # that itself.
        self._gradients = {index: span for index, span in self._gradients.items() if index in self._reached}
        if not self._searched:
            self.skip = AuditSkip.WEIGHTED_BACKWARD
        elif not self._gradients:
            self.skip = AuditSkip.OTHER_PATHS
        else:
            packer = self._packer
            first = len(packer.spans)
            packer.spans.extend(self._gradients.values())
            gradients = {str(index): first + position for position, index in enumerate(self._gradients)}
            content = {**self._content, **identity, "gradients": gradients}
            size = write_payload(path, packer, content)
            self.release()
            return size
        return 0

    def release(self) -> None:
        """Nothing more is captured. Hooks on the outputs refer to this object, so it must not keep their nodes."""
        self.end_forward()
        self._packer = Packer()
        self._content = {}
        self._gradients.clear()
        self._nodes.clear()


def _is_sequence(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(each, torch.Tensor) for each in value)


class GraphSearch(NamedTuple):
    """What a loss reaches: parameters that it reaches without passing a stop, by index, and the stops."""

    parameters: set[int]
    stops: set[Any]


def search_graph(
    roots: Sequence[torch.Tensor], stops: set[Any], parameters: Mapping[int, int]
) -> GraphSearch | None:
    """`parameters`: indices by the id of the parameter. None: the graph is too large to search."""
    search = GraphSearch(set(), set())
    seen: set[Any] = set()
    stack = [root.grad_fn for root in roots if root.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if len(seen) > _MAX_NODES:
            return None
        if node in stops:
            search.stops.add(node)
            continue
        # A node that accumulates a gradient.
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor) and id(variable) in parameters:
            search.parameters.add(parameters[id(variable)])
        stack.extend(following for following, _ in node.next_functions if following is not None)
    return search
