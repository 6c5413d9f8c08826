"""Takes digests of every parameter and buffer at each stage of a job, to compare ranks bit for bit."""

from __future__ import annotations

import base64
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ddpcheck.probes.digest import combine
from ddpcheck.probes.digest.submit import submit
from ddpcheck.probes.live_compare.snapshot import Snapshot, SnapshotKey
from ddpcheck.probes.probe import Probe, ProbeContext
from ddpcheck.probes.write_detection import TensorSampler, TensorSamples, WriteDetector, version_of
from ddpcheck.records.kinds.digests import (
    BUFFERS_NOT_SYNCED,
    NORM_STATISTICS,
    DigestRecord,
    Stage,
    TensorKind,
)

if TYPE_CHECKING:
    from ddpcheck.agent.tracked_module import TrackedModule
    from ddpcheck.agent.tracked_optimizer import TrackedOptimizer
    from ddpcheck.probes.digest import DigestFuture

# Bytes of each leaf in a step's record: the root decides whether ranks agree, leaves only say where. Two
# bytes miss a differing parameter once in 65,536; buffers are many and small, and mostly differ together.
WIDTH = {Stage.INIT_BEFORE: 8, Stage.INIT_AFTER: 8, Stage.BUFFERS: 1, Stage.BUFFERS_END: 8}
NARROW = 2
LINGER_SECONDS = 2.0
# For buffers that perhaps no other rank looks at.
SHORT_LINGER_SECONDS = 0.3


class PendingDigest(NamedTuple):
    """Digests that are on their way from a device."""

    ticket: DigestFuture
    moment: SnapshotKey
    places: list[int] | None
    samples: bytes
    only_changes: bool
    hyper: str
    how: str
    # Training forwards until then.
    forward: int


class ParameterWrite(NamedTuple):
    """Parameters that were found changed though no optimizer has stepped."""

    pending: PendingDigest
    root: bytes
    leaves: list[bytes]
    current: bool


class ParameterProbe(Probe):
    """Looks in line, in the training thread: a look beside it could see a write half done (see docs)."""

    name = "parameters"

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._pending: deque[PendingDigest] = deque()
        self._last: dict[tuple[int, TensorKind], Snapshot] = {}
        self._samplers: dict[tuple[int, TensorKind], TensorSampler] = {}
        # How each module's parameters stood after the last step.
        self._marks: dict[int, TensorSamples] = {}
        self._writes = WriteDetector()
        # The first change without an optimizer: an update by hand, unless it is put back or an optimizer steps after
        # all. Training at disturbed weights (SAM) begins like that, and each rank may disturb its own way.
        self._held: dict[int, ParameterWrite] = {}
        self._by_hand: set[int] = set()
        # And its buffers before it, with the number of training forwards so far.
        self._buffer_marks: dict[int, tuple[int, list[tuple[int, int]]]] = {}
        self._node_compare = context.node_compare
        self._ended = False

    def before_wrap(self, tracked: TrackedModule) -> None:
        self.context.write(tracked.record())
        self._look(SnapshotKey(tracked, Stage.INIT_BEFORE, TensorKind.PARAMETERS, -1))
        self._look(SnapshotKey(tracked, Stage.INIT_BEFORE, TensorKind.BUFFERS, -1))

    def after_wrap(self, tracked: TrackedModule) -> None:
        self._look(SnapshotKey(tracked, Stage.INIT_AFTER, TensorKind.PARAMETERS, -1))
        self._look(SnapshotKey(tracked, Stage.INIT_AFTER, TensorKind.BUFFERS, -1))
        self._marks[tracked.index] = self._sample(tracked)

    def before_forward(self, tracked: TrackedModule) -> None:
        self._settle()
        if self._node_compare is not None:
            self._node_compare.catch_up()
        if not tracked.stepped:
            self._look_without_optimizer(tracked)
        elif self._writes.awaits(tracked):
            self._writes.forward(tracked, self._sample(tracked))

    def backward_begun(self, tracked: TrackedModule) -> None:
        if self._writes.awaits(tracked):
            self._writes.backward(tracked, self._sample(tracked))

    def unsynced_backward_begun(self, tracked: TrackedModule) -> None:
        """Who goes around the wrapper comes to no forward of it; updates by hand show here then."""
        if not tracked.stepped:
            self._look_without_optimizer(tracked)

    def buffers_synced(self, tracked: TrackedModule) -> None:
        if tracked.syncs % self.context.config.every == 0:
            self._look(SnapshotKey(tracked, Stage.BUFFERS, TensorKind.BUFFERS, tracked.syncs))
            self._outdate(tracked, TensorKind.BUFFERS)

    def before_step(self, optimizer: TrackedOptimizer) -> None:
        self._settle()
        if self._node_compare is not None:
            self._node_compare.catch_up()
        for tracked in optimizer.modules:
            before, marks = self._marks.get(tracked.index), self._sample(tracked)
            if marks != before:
                moment = SnapshotKey(
                    tracked, Stage.REWRITTEN, TensorKind.PARAMETERS, optimizer.steps, optimizer.index
                )
                self._look(moment, marks=marks, how=self._writes.when(tracked, before))
            self._outdate(tracked, TensorKind.PARAMETERS)
        # All modules: GANs run one through another's step.
        for (index, of), look in self._last.items():
            if of is TensorKind.BUFFERS:
                self._buffer_marks[index] = _written(look.moment.tracked)

    def after_step(self, optimizer: TrackedOptimizer) -> None:
        for tracked in optimizer.modules:
            self._held.pop(tracked.index, None)
            marks = self._marks[tracked.index] = self._sample(tracked)
            if optimizer.steps % self.context.config.every == 0:
                moment = SnapshotKey(
                    tracked, Stage.PARAMS, TensorKind.PARAMETERS, optimizer.steps, optimizer.index
                )
                self._look(moment, self._places(optimizer, tracked), hyper=optimizer.hyper, marks=marks)

    def wrapper_released(self, tracked: TrackedModule) -> None:
        if self._ended:
            return
        self._look_at_last_buffers(tracked)
        if not tracked.stepped and not self._wrapped_anew(tracked):
            self._look_for_the_last_time(tracked)

    def before_exit(self) -> None:
        self._ended = True
        self._settle(wait=True)
        deadline = time.monotonic() + LINGER_SECONDS
        for (_, of), look in list(self._last.items()):
            tracked = look.moment.tracked
            if not tracked.parameters:
                continue
            if of is TensorKind.BUFFERS:
                self._look_at_last_buffers(tracked)
            elif not tracked.stepped:
                self._look_for_the_last_time(tracked)
            look = self._last[tracked.index, of]
            if self._node_compare is None or look.number < 0:
                continue
            if of is TensorKind.PARAMETERS:
                self._node_compare.linger(look, deadline)
            elif look.moment.stage is Stage.BUFFERS_END:
                self._node_compare.linger(look, min(deadline, time.monotonic() + SHORT_LINGER_SECONDS))
        if self._node_compare is not None:
            self._node_compare.part(deadline)

    def _look_at_last_buffers(self, tracked: TrackedModule) -> None:
        """After a training forward BatchNorm's statistics rightly differ; what is written later should not.

        A forward without a step, as at the end of gradient accumulation, hides the one behind the other.
        """
        before = self._buffer_marks.get(tracked.index)
        now = _written(tracked)
        places, how = tracked.kept_buffers(), ""
        if before is None or before == now or before[0] != now[0]:
            if not tracked.forwards or not _left_alone(tracked):
                return
            # Statistics of normalisation are a rank's own then, as everybody knows; a codebook or a queue is not.
            places = [place for place in places if tracked.buffers[place].key not in NORM_STATISTICS]
            how = BUFFERS_NOT_SYNCED
        if places:
            self._look(SnapshotKey(tracked, Stage.BUFFERS_END, TensorKind.BUFFERS, -1), places, how=how)

    def _look_without_optimizer(self, tracked: TrackedModule) -> None:
        """Without an optimizer: a hand-written update shows as a change between two forwards."""
        if (tracked.index, TensorKind.PARAMETERS) in self._last and tracked.parameters:
            stage = Stage.PARAMS if tracked.forwards else Stage.REWRITTEN
            how = tracked.backward.came_to() if tracked.backward is not None and tracked.forwards else ""
            self._look(
                SnapshotKey(tracked, stage, TensorKind.PARAMETERS, tracked.steps), only_changes=True, how=how
            )

    def _look_for_the_last_time(self, tracked: TrackedModule) -> None:
        """An update by hand after the last forward, and one that nothing has followed."""
        self._look_without_optimizer(tracked)
        self._settle(wait=True)
        held = self._held.pop(tracked.index, None)
        if held is not None:
            self._keep(held)

    def _wrapped_anew(self, tracked: TrackedModule) -> bool:
        """Whether a later wrapper trains the same parameters: ranks may let go of the old one at any time."""
        mine = set(map(id, tracked.tensors(tracked.parameters)))
        later = [
            look.moment.tracked for look in self._last.values() if look.moment.tracked.index > tracked.index
        ]
        return any(id(tensor) in mine for other in later for tensor in other.tensors(other.parameters))

    def _places(self, optimizer: TrackedOptimizer, tracked: TrackedModule) -> list[int] | None:
        """What to read after this step; None: all. What another optimizer steps, its own look covers."""
        others = tracked.owners.keys() - {optimizer.index}
        last = self._last.get((tracked.index, TensorKind.PARAMETERS))
        if not others or last is None or len(last.leaves) != len(tracked.parameters):
            return None
        elsewhere = set().union(*(tracked.owners[other] for other in others)) - optimizer.owned(tracked)
        return [place for place in range(len(tracked.parameters)) if place not in elsewhere]

    def _look(
        self,
        moment: SnapshotKey,
        places: list[int] | None = None,
        only_changes: bool = False,
        hyper: str = "",
        marks: TensorSamples | None = None,
        how: str = "",
    ) -> None:
        tracked = moment.tracked
        slots = tracked.buffers if moment.of is TensorKind.BUFFERS else tracked.parameters
        tensors = tracked.tensors(slots)
        if not tensors:
            return
        ticket = submit(tensors if places is None else [tensors[place] for place in places])
        samples = (marks or self._sample(tracked, moment.of)).packed()
        pending = PendingDigest(ticket, moment, places, samples, only_changes, hyper, how, tracked.forwards)
        if self._pending or not ticket.ready():
            self._pending.append(pending)
        else:
            self._finish(pending, current=True)

    def _sample(self, tracked: TrackedModule, of: TensorKind = TensorKind.PARAMETERS) -> TensorSamples:
        sampler = self._samplers.setdefault((tracked.index, of), TensorSampler())
        return sampler.take(
            tracked.tensors(tracked.buffers if of is TensorKind.BUFFERS else tracked.parameters)
        )

    def _settle(self, wait: bool = False) -> None:
        """Take in digests that have arrived from a device; in the training loop nothing waits for them."""
        while self._pending and (wait or self._pending[0].ticket.ready()):
            self._finish(self._pending.popleft(), current=False)

    def _finish(self, pending: PendingDigest, current: bool) -> None:
        moment = pending.moment
        slot = (moment.tracked.index, moment.of)
        last = self._last.get(slot)
        leaves = pending.ticket.result()
        if pending.places is not None and last is not None:
            known = list(last.leaves)
            for place, leaf in zip(pending.places, leaves, strict=True):
                known[place] = leaf
            leaves = known
        now = ParameterWrite(pending, combine(leaves), leaves, current)
        if not pending.only_changes or self._is_update(now, last):
            self._keep(now)

    def _is_update(self, now: ParameterWrite, last: Snapshot | None) -> bool:
        """Whether this is one more update by hand, as far as that can be told yet."""
        moment = now.pending.moment
        tracked = moment.tracked
        held = self._held.get(tracked.index)
        if last is not None and now.root == (last.root if held is None else held.root):
            return False
        tracked.end_window()
        if moment.stage is not Stage.PARAMS or tracked.index in self._by_hand:
            return True
        if held is None:
            self._held[tracked.index] = now
            return False
        del self._held[tracked.index]
        if last is not None and now.root == last.root:
            return False
        self._by_hand.add(tracked.index)
        self._keep(held._replace(current=False))
        return True

    def _keep(self, change: ParameterWrite) -> None:
        pending, moment = change.pending, change.pending.moment
        slot = (moment.tracked.index, moment.of)
        if pending.only_changes:
            moment = replace(moment, step=moment.tracked.next_step)
            if moment.stage is Stage.PARAMS:
                moment.tracked.count_step()
        last = self._last.get(slot)
        if last is not None:
            last.current = False
        key = moment.key(self.context.session)
        look = Snapshot(moment, key, change.root, change.leaves, pending.samples, current=change.current)
        self._last[slot] = look
        self._record(look, pending)

    def _record(self, look: Snapshot, pending: PendingDigest) -> None:
        moment = look.moment
        width = WIDTH.get(moment.stage, NARROW)
        self.context.write(
            DigestRecord(
                module=moment.tracked.index,
                stage=moment.stage.value,
                step=moment.step,
                of=moment.of.value,
                root=look.root.hex(),
                leaves=base64.b64encode(b"".join(leaf[:width] for leaf in look.leaves)).decode(),
                width=width,
                time=round(time.time(), 4),
                optimizer=moment.optimizer,
                forward=pending.forward,
                hyper=pending.hyper,
                how=pending.how,
            )
        )
        # Before the broadcast ranks may rightly differ, and so they may under post-localSGD.
        if self._node_compare is not None and not (moment.tracked.loose or moment.stage is Stage.INIT_BEFORE):
            self._node_compare.publish(look)

    def _outdate(self, tracked: TrackedModule, of: TensorKind) -> None:
        """From here on the tensors may change: what was looked at can no longer be captured."""
        look = self._last.get((tracked.index, of))
        if look is not None:
            look.current = False


def _left_alone(tracked: TrackedModule) -> bool:
    """Whether DDP was told not to synchronise buffers in the forward."""
    return any(tracked.options.get(name) is False for name in ("broadcast_buffers", "forward_sync_buffers"))


def _written(tracked: TrackedModule) -> tuple[int, list[tuple[int, int]]]:
    """Changes with every write to a buffer that autograd can see, and with every training forward."""
    tensors = tracked.tensors(tracked.buffers)
    return tracked.forwards, [(id(tensor), version_of(tensor)) for tensor in tensors]
