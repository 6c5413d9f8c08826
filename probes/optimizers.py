"""Records the hyperparameters, scale and skipped steps of each optimizer and, on request, its state."""

from __future__ import annotations

import base64
import hashlib
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ddpcheck import torch_compat
from ddpcheck.probes.digest import Leaves, combine
from ddpcheck.probes.probe import Probe, ProbeContext
from ddpcheck.probes.process.callsite import user_callsite
from ddpcheck.probes.scan.scanner import Scan, TensorScanner
from ddpcheck.records.kinds.digests import DigestRecord, Stage, TensorKind
from ddpcheck.records.kinds.modules import HyperRecord, OptimizerRecord, SkipRecord

if TYPE_CHECKING:
    from ddpcheck.agent.tracked_module import TrackedModule
    from ddpcheck.agent.tracked_optimizer import TrackedOptimizer

NO_STATE = bytes(16)


class StatePlan(NamedTuple):
    """The state of one parameter: its numbers as text, and its tensors in the scan of all of them."""

    plain: bytes
    first: int
    size: int

    def leaf(self, digests: Leaves) -> bytes:
        """One digest of everything that the optimizer keeps for the parameter."""
        return combine([self.plain, *(digests[self.first + number] for number in range(self.size))])


class PendingState(NamedTuple):
    """Digests of a state that may still be computed on a device."""

    scan: Scan
    plans: list[StatePlan | None]
    record: DigestRecord


class OptimizerProbe(Probe):
    """Hyperparameters are written when they change; a step's record has only a short digest of them."""

    name = "optimizers"

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._values: dict[int, dict[str, Any]] = {}
        self._signatures: dict[int, tuple[int, ...]] = {}
        # Id of the state dict of each optimizer at its last step: only compared, never read.
        self._states: dict[int, int] = {}
        self._scanners: dict[tuple[int, int], TensorScanner] = {}
        # States that are still read on a device.
        self._pending: deque[PendingState] = deque()

    def before_step(self, optimizer: TrackedOptimizer) -> None:
        if self._pending:
            self._drain()
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

    before_side_step = before_step
    after_side_step = after_step

    def step_skipped(self, optimizer: TrackedOptimizer) -> None:
        for module in optimizer.modules:
            self.context.write(
                SkipRecord(optimizer.index, module.index, optimizer.steps, module.forwards, optimizer.scale)
            )

    def before_exit(self) -> None:
        self._drain(wait=True)

    def _drain(self, wait: bool = False) -> None:
        """Write the states that have arrived from a device; never waits in the training loop."""
        while self._pending and (wait or self._pending[0].scan.ready()):
            self._finish(self._pending.popleft())

    def _write_state(
        self, optimizer: TrackedOptimizer, torch_optimizer: torch.optim.Optimizer, tracked: TrackedModule
    ) -> None:
        owned = optimizer.owned(tracked)
        parameters = tracked.stepped_objects()
        states = [
            torch_optimizer.state.get(tensor) if index in owned else None
            for index, tensor in enumerate(parameters)
        ]
        if not any(states):
            return
        # All tensors of all parameters in one scan.
        tensors: list[torch.Tensor] = []
        plans: list[StatePlan | None] = []
        for state in states:
            if not state:
                plans.append(None)
                continue
            names = sorted(name for name, value in state.items() if isinstance(value, torch.Tensor))
            plain = sorted((n, repr(v)) for n, v in state.items() if isinstance(v, (int, float, bool, str)))
            plans.append(StatePlan(repr(plain).encode(), len(tensors), len(names)))
            # Of a DTensor, the part of this rank.
            tensors += [torch_compat.read(torch_compat.LOCAL_TENSOR, state[n], state[n]) for n in names]
        scanner = self._scanners.setdefault((optimizer.index, tracked.index), TensorScanner())
        scanner.update(tensors)
        scan = scanner.scan(tensors, b"\1" * len(tensors))
        record = DigestRecord(
            module=tracked.index,
            stage=Stage.STATE.value,
            of=TensorKind.STATE.value,
            step=optimizer.steps,
            optimizer=optimizer.index,
            root="",
            leaves="",
            width=2,
            time=time.time(),
            # A sharded optimizer has the state of different parameters on each rank: those cannot be compared.
            hyper=hashlib.blake2b(bytes(map(bool, states)), digest_size=4).hexdigest(),
        )
        self._pending.append(PendingState(scan, plans, record))
        self._drain()

    def _finish(self, pending: PendingState) -> None:
        digests = pending.scan.leaves()
        leaves = [NO_STATE if plan is None else plan.leaf(digests) for plan in pending.plans]
        packed = base64.b64encode(b"".join(leaf[:2] for leaf in leaves)).decode()
        self.context.write(replace(pending.record, root=combine(leaves).hex(), leaves=packed))
