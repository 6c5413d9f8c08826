"""Sharded modules: steps on shards whose gradients FSDP2 has not reduced, and the buffers of the outermost module."""

from __future__ import annotations

import base64
import gc
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any, ClassVar

from ddpcheck import torch_compat
from ddpcheck.probes.digest import combine
from ddpcheck.probes.digest.submit import submit
from ddpcheck.probes.probe import Probe, ProbeContext
from ddpcheck.probes.process.callsite import user_callsite
from ddpcheck.records.kinds.digests import NORM_STATISTICS, DigestRecord, Stage, TensorKind
from ddpcheck.records.kinds.modules import ModuleRole
from ddpcheck.records.kinds.shards import PendingGradientsRecord, PendingReason
from ddpcheck.records.reasons import BufferState

if TYPE_CHECKING:
    from ddpcheck.agent.tracked_module import TrackedModule
    from ddpcheck.agent.tracked_optimizer import TrackedOptimizer

# `ModuleRecord.mesh["kind"]` of parameters that FSDP2 or a device mesh distributes.
DTENSOR = "dtensor"
_MOST_NAMES = 10
# Looking for the switch goes through all objects of the process.
_MOST_SEARCHES = 4
_grad = attrgetter("grad")
WIDTH = 8
# Of a buffer that is not compared at the end: statistics of normalisation layers, which no one synchronises, and what a
# rank has changed of buffers that checkpoints do not contain.
NOT_COMPARED = bytes(16)


@dataclass
class PendingGradients:
    """Steps of a module that lacked the same gradients for the same reason."""

    missing: frozenset[int]
    record: PendingGradientsRecord | None
    steps: int = 0


class PendingGradientsProbe(Probe):
    """Where every shard has a gradient, as in most jobs, it compares each with None and does nothing else."""

    name = "pending_gradients"
    # Once shards of a device mesh are trained.
    on_demand: ClassVar[frozenset[str]] = frozenset({"before_step"})

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._found: dict[int, PendingGradients] = {}
        self._searches = 0
        self._called = False

    def unwrapped_found(self, tracked: TrackedModule) -> None:
        if not self._called and _is_sharded(tracked):
            self._called = True
            self.context.call(self, Probe.before_step)

    def before_step(self, optimizer: TrackedOptimizer) -> None:
        for tracked in optimizer.modules:
            if not _is_sharded(tracked):
                continue
            shards = tracked.shards()
            if any(map(is_, map(_grad, shards), repeat(None))):
                self._note(optimizer, tracked, shards)

    def before_exit(self) -> None:
        for pending in self._found.values():
            self._write(pending)

    def _note(self, optimizer: TrackedOptimizer, tracked: TrackedModule, shards: list[Any]) -> None:
        missing = frozenset(id(each) for each in shards if each.grad is None)
        known = self._found.get(tracked.index)
        if known is None or known.missing != missing:
            if known is not None and known.record is not None:
                # The first pattern of a module is the evidence.
                return
            if self._searches >= _MOST_SEARCHES:
                return
            self._searches += 1
            known = PendingGradients(missing, self._search(optimizer, tracked, shards, missing))
            self._found[tracked.index] = known
        known.steps += 1
        if known.steps & (known.steps - 1) == 0:
            self._write(known)

    def _write(self, pending: PendingGradients) -> None:
        record = pending.record
        if record is not None and record.steps != pending.steps:
            values = {**vars(record), "steps": pending.steps}
            pending.record = PendingGradientsRecord(**values)
            self.context.write(pending.record)

    def _search(
        self, optimizer: TrackedOptimizer, tracked: TrackedModule, shards: list[Any], missing: frozenset[int]
    ) -> PendingGradientsRecord | None:
        """None if the missing gradients have another reason, such as parameters that the forward did not use."""
        by_reason: dict[PendingReason, list[int]] = {}
        for reason, shard in _switched_off():
            if id(shard) in missing:
                by_reason.setdefault(reason, []).append(id(shard))
        if not by_reason:
            return None
        reason = (
            PendingReason.SYNC_OFF if PendingReason.SYNC_OFF in by_reason else PendingReason.ALL_REDUCE_OFF
        )
        pending = set(by_reason[reason])
        names = [
            name for name, shard in zip(tracked.shard_names(), shards, strict=True) if id(shard) in pending
        ]
        return PendingGradientsRecord(
            module=tracked.index,
            optimizer=optimizer.index,
            step=optimizer.steps,
            steps=0,
            reason=reason.value,
            parameters=names[:_MOST_NAMES],
            count=len(names),
            where=user_callsite(),
        )


def _is_sharded(tracked: TrackedModule) -> bool:
    return tracked.role is ModuleRole.SHARDED and tracked.mesh.get("kind") == DTENSOR


def _switched_off() -> Iterator[tuple[PendingReason, Any]]:
    """The shards of FSDP2 whose reduction is switched off, and how."""
    cls = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if cls is None:
        return
    for module in gc.get_objects():
        if not issubclass(type(module), cls):
            continue
        state_of = torch_compat.read(torch_compat.FSDP_STATE, module)
        state = state_of() if state_of is not None else None
        for group in torch_compat.read(torch_compat.FSDP_GROUPS, state, ()):
            reduces = torch_compat.read(torch_compat.FSDP_REDUCES, group, True)
            all_reduces = torch_compat.read(torch_compat.FSDP_ALL_REDUCES, group, True)
            if reduces and all_reduces:
                continue
            reason = PendingReason.ALL_REDUCE_OFF if reduces else PendingReason.SYNC_OFF
            for each in torch_compat.read(torch_compat.FSDP_PARAMETERS, group, ()):
                yield reason, getattr(each, "sharded_param", None)


class ShardedRootProbe(Probe):
    """FSDP does not synchronise buffers: they are read twice, and nothing of them at a step."""

    name = "sharded_root"

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._roots: dict[int, TrackedModule] = {}
        # By root and index of the buffer, the digest before the training.
        self._before: dict[tuple[int, int], bytes] = {}

    def root_found(self, tracked: TrackedModule) -> None:
        self.context.write(tracked.record())
        if tracked.buffers:
            self._roots[tracked.index] = tracked
            self._write(tracked, Stage.INIT_AFTER)

    def wrapper_released(self, tracked: TrackedModule) -> None:
        if tracked.role is ModuleRole.ROOT and self._roots.pop(tracked.index, None) is not None:
            self._write(tracked, Stage.BUFFERS_END)

    def before_exit(self) -> None:
        for tracked in self._roots.values():
            self._write(tracked, Stage.BUFFERS_END)
        self._roots.clear()

    def _write(self, tracked: TrackedModule, stage: Stage) -> None:
        tensors = {index: slot.holder.get(slot.key) for index, slot in enumerate(tracked.buffers)}
        present = {index: tensor for index, tensor in tensors.items() if tensor is not None}
        digests = dict(zip(present, submit(list(present.values())).result(), strict=True))
        if stage is Stage.INIT_AFTER:
            self._before.update({(tracked.index, index): digest for index, digest in digests.items()})
        else:
            saved = {
                index
                for index in tracked.checkpointed_buffers()
                if tracked.buffers[index].key not in NORM_STATISTICS
            }
            digests = {
                index: digest
                for index, digest in digests.items()
                if index in saved or self._before.pop((tracked.index, index), None) == digest
            }
        leaves = [digests.get(index, NOT_COMPARED) for index in range(len(tracked.buffers))]
        self.context.write(
            DigestRecord(
                module=tracked.index,
                stage=stage.value,
                step=-1,
                root=combine(leaves).hex(),
                leaves=base64.b64encode(b"".join(leaf[:WIDTH] for leaf in leaves)).decode(),
                width=WIDTH,
                of=TensorKind.BUFFERS.value,
                time=round(time.time(), 4),
                optimizer=None,
                forward=tracked.forwards,
                how=BufferState.NOT_SYNCED.value if stage is Stage.BUFFERS_END else "",
            )
        )
