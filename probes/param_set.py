"""Which parameters DDP does not reduce: those that its reducer does not know, and those that it ignores on request."""

from __future__ import annotations

import base64
import time
from typing import TYPE_CHECKING, ClassVar

import torch

from ddpcheck.probes.digest import combine
from ddpcheck.probes.digest.submit import submit
from ddpcheck.probes.probe import Probe, ProbeContext
from ddpcheck.records.kinds.digests import DigestRecord, Stage, TensorKind
from ddpcheck.records.kinds.modules import CommHookRecord, JoinRecord, ModuleUseRecord, StructureRecord

if TYPE_CHECKING:
    from ddpcheck.agent.tracked_module import ParamSetChange, TrackedModule
    from ddpcheck.agent.tracked_optimizer import TrackedOptimizer

# Bounds the records of a job that swaps parameters at every step.
MAX_CHANGES = 1000
NO_DIGEST = bytes(16)
WIDTH = 8
MAX_SNAPSHOTS = 4
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class ParamSetProbe(Probe):
    """Parameters that were added, replaced or unfrozen after wrapping, by identities and flags; reads no tensor."""

    name = "structure"

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._written = 0
        # Modules whose join() is written, and how many communication hooks of each are.
        self._joined: set[int] = set()
        self._hooks: dict[int, int] = {}

    def wrapper_changed(self, tracked: TrackedModule) -> None:
        if tracked.joined and tracked.index not in self._joined:
            self._joined.add(tracked.index)
            self.context.write(JoinRecord(tracked.index, tracked.steps))
        for name in tracked.comm_hooks[self._hooks.get(tracked.index, 0) :]:
            self.context.write(CommHookRecord(tracked.index, name, tracked.steps))
        self._hooks[tracked.index] = len(tracked.comm_hooks)

    def parameters_changed(self, tracked: TrackedModule, changes: list[ParamSetChange]) -> None:
        if self._written > MAX_CHANGES:
            return
        self._written += 1 + len(changes)
        # Digests that follow refer to this list of names.
        self.context.write(tracked.record())
        for change in changes:
            self.context.write(
                StructureRecord(
                    tracked.index, change.change, change.parameter, tracked.steps, tracked.forwards
                )
            )

    def module_used(self, tracked: TrackedModule, evidence: list[str]) -> None:
        self.context.write(ModuleUseRecord(tracked.index, evidence))


class IgnoredProbe(Probe):
    """Values after wrapping, and gradients of the first steps.

    Ignored parameters may differ. But if ranks apply the same gradients to them, they are meant to be equal.
    """

    name = "ignored"
    on_demand: ClassVar[frozenset[str]] = frozenset({"before_step"})

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._gradients: dict[tuple[int, int], list[bytes]] = {}
        self._called = False

    def after_wrap(self, tracked: TrackedModule) -> None:
        if tracked.ignored and not self._called:
            self._called = True
            self.context.call(self, Probe.before_step)
        ignored = _ignored(tracked)
        if ignored:
            self._write(tracked, Stage.INIT_AFTER, -1, None, _leaves(tracked, ignored))

    def before_step(self, optimizer: TrackedOptimizer) -> None:
        for tracked in optimizer.modules:
            if tracked.ignored:
                self._check(optimizer, tracked)

    def _check(self, optimizer: TrackedOptimizer, tracked: TrackedModule) -> None:
        roots = self._gradients.setdefault((tracked.index, optimizer.index), [])
        if len(roots) >= MAX_SNAPSHOTS:
            return
        gradients = {n: p.grad for n, p in _ignored(tracked).items() if p.grad is not None}
        leaves = _leaves(tracked, gradients)
        roots.append(combine(leaves))
        # A gradient that never changes, usually zero, is the same on all ranks without being shared.
        if gradients and len(roots) > 1 and roots[-1] != roots[-2]:
            self._write(tracked, Stage.APPLIED, optimizer.steps, optimizer.index, leaves)

    def _write(
        self, tracked: TrackedModule, stage: Stage, step: int, optimizer: int | None, leaves: list[bytes]
    ) -> None:
        self.context.write(
            DigestRecord(
                module=tracked.index,
                stage=stage.value,
                step=step,
                root=combine(leaves).hex(),
                leaves=base64.b64encode(b"".join(leaf[:WIDTH] for leaf in leaves)).decode(),
                width=WIDTH,
                of=TensorKind.IGNORED.value,
                time=round(time.time(), 4),
                optimizer=optimizer,
                forward=tracked.forwards,
            )
        )


def _ignored(tracked: TrackedModule) -> dict[str, torch.Tensor]:
    """Plain trainable ones; a tensor subclass, as sharding makes it, is a different part on each rank."""
    module = tracked.module()
    if module is None or not tracked.ignored:
        return {}
    return {
        name: parameter
        for name, parameter in module.named_parameters()
        if name in tracked.ignored and parameter.requires_grad and type(parameter) in _PLAIN
    }


def _leaves(tracked: TrackedModule, tensors: dict[str, torch.Tensor]) -> list[bytes]:
    """In the order in which the module's record lists the ignored parameters."""
    names = [name for name in sorted(tracked.ignored) if name in tensors]
    digests = dict(zip(names, submit([tensors[name] for name in names]).result(), strict=True))
    return [digests.get(name, NO_DIGEST) for name in sorted(tracked.ignored)]
