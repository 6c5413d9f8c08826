"""Records the hyperparameters, scale and skipped steps of each optimizer and, on request, its state."""

from __future__ import annotations

import base64
import hashlib
import time
from typing import TYPE_CHECKING, Any

import torch

from ddpcheck.probes.digest import combine
from ddpcheck.probes.digest.submit import submit
from ddpcheck.probes.probe import Probe, ProbeContext
from ddpcheck.probes.process.callsite import user_callsite
from ddpcheck.records.kinds.digests import DigestRecord, Stage, TensorKind
from ddpcheck.records.kinds.modules import HyperRecord, OptimizerRecord, SkipRecord

if TYPE_CHECKING:
    from ddpcheck.agent.tracked_module import TrackedModule
    from ddpcheck.agent.tracked_optimizer import TrackedOptimizer

NO_STATE = bytes(16)


class OptimizerProbe(Probe):
    """Hyperparameters are written when they change; a step's record has only a short digest of them."""

    name = "optimizers"

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._values: dict[int, dict[str, Any]] = {}
        self._signatures: dict[int, tuple[int, ...]] = {}
        # Id of the state dict of each optimizer at its last step: only compared, never read.
        self._states: dict[int, int] = {}

    def before_step(self, optimizer: TrackedOptimizer) -> None:
        self._write_groups(optimizer)
        # Before the step, a differing state is a cause; after it, it may be an effect of the gradients. A digest at the
        # first step and after each load shows a state that only some ranks loaded; one at every step needs one more
        # pass.
        torch_optimizer = optimizer.ref()
        if torch_optimizer is None:
            return
        if self._loaded(optimizer, torch_optimizer) or self.context.config.optimizer_state:
            for tracked in optimizer.modules:
                self._write_state(optimizer, torch_optimizer, tracked)

    def _loaded(self, optimizer: TrackedOptimizer, torch_optimizer: torch.optim.Optimizer) -> bool:
        """Whether the state is a new dict: load_state_dict makes one."""
        state = id(torch_optimizer.state)
        loaded = self._states.get(optimizer.index) != state
        self._states[optimizer.index] = state
        return loaded

    def _write_groups(self, optimizer: TrackedOptimizer) -> None:
        if self._signatures.get(optimizer.index) == optimizer.signature:
            return
        self._signatures[optimizer.index] = optimizer.signature
        callsite = user_callsite()
        for tracked in optimizer.modules:
            groups = optimizer.groups[tracked.index]
            self.context.write(
                OptimizerRecord(optimizer.index, optimizer.name, tracked.index, groups, callsite)
            )

    def after_step(self, optimizer: TrackedOptimizer) -> None:
        values, before = optimizer.hyperparameters, self._values.get(optimizer.index, {})
        if values is before:
            return
        self._values[optimizer.index] = values
        changed = {name: value for name, value in values.items() if before.get(name, before) != value}
        if changed or values.keys() != before.keys():
            self.context.write(HyperRecord(optimizer.index, optimizer.steps, changed))

    def step_skipped(self, optimizer: TrackedOptimizer) -> None:
        for module in optimizer.modules:
            self.context.write(
                SkipRecord(optimizer.index, module.index, optimizer.steps, module.forwards, optimizer.scale)
            )

    def _write_state(
        self, optimizer: TrackedOptimizer, torch_optimizer: torch.optim.Optimizer, tracked: TrackedModule
    ) -> None:
        tensors = tracked.tensors(tracked.parameters)
        owned = optimizer.owned(tracked)
        leaves = [
            _state_leaf(torch_optimizer.state.get(tensor)) if index in owned else NO_STATE
            for index, tensor in enumerate(tensors)
        ]
        has_state = bytes(leaf != NO_STATE for leaf in leaves)
        if not any(has_state):
            return
        self.context.write(
            DigestRecord(
                module=tracked.index,
                stage=Stage.STATE.value,
                of=TensorKind.STATE.value,
                step=optimizer.steps,
                optimizer=optimizer.index,
                root=combine(leaves).hex(),
                leaves=base64.b64encode(b"".join(leaf[:2] for leaf in leaves)).decode(),
                width=2,
                time=time.time(),
                # A sharded optimizer has the state of different parameters on each rank: those cannot be compared.
                hyper=hashlib.blake2b(has_state, digest_size=4).hexdigest(),
            )
        )


def _state_leaf(state: Any) -> bytes:
    """One digest of everything that the optimizer keeps for a parameter."""
    if not state:
        return NO_STATE
    names = sorted(name for name, value in state.items() if isinstance(value, torch.Tensor))
    plain = sorted((n, repr(v)) for n, v in state.items() if isinstance(v, (int, float, bool, str)))
    leaves = submit([state[name] for name in names]).result()
    return combine([repr(plain).encode(), *leaves])
