"""Describes the outermost modules that FSDP shards, and digests their buffers: before the training, and at its end."""

from __future__ import annotations

import base64
import time
from typing import TYPE_CHECKING

from ddpcheck.probes.digest import combine
from ddpcheck.probes.digest.submit import submit
from ddpcheck.probes.probe import Probe, ProbeContext
from ddpcheck.records.kinds.digests import NORM_STATISTICS, DigestRecord, Stage, TensorKind
from ddpcheck.records.kinds.modules import ModuleRole
from ddpcheck.records.reasons import BufferState

if TYPE_CHECKING:
    from ddpcheck.agent.tracked_module import TrackedModule

WIDTH = 8
# Of a buffer that is not compared at the end: statistics of normalisation layers, which no one synchronises, and what a
# rank has changed of buffers that checkpoints do not contain.
NOT_COMPARED = bytes(16)


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
