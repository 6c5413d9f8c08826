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
from ddpcheck.records.schema import LEFT_ALONE, STATISTICS, DigestRecord, Stage, TensorKind

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

    def __init__(self, scene: ProbeContext) -> None:
        super().__init__(scene)
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
        self._disagreements = scene.disagreements
        self._ended = False

    def entering(self, watched: TrackedModule) -> None:
        self.scene.write(watched.record())
        self._look(SnapshotKey(watched, Stage.INIT_BEFORE, TensorKind.PARAMETERS, -1))
        self._look(SnapshotKey(watched, Stage.INIT_BEFORE, TensorKind.BUFFERS, -1))

    def wrapped(self, watched: TrackedModule) -> None:
        self._look(SnapshotKey(watched, Stage.INIT_AFTER, TensorKind.PARAMETERS, -1))
        self._look(SnapshotKey(watched, Stage.INIT_AFTER, TensorKind.BUFFERS, -1))
        self._marks[watched.index] = self._sample(watched)

    def forward(self, watched: TrackedModule) -> None:
        self._settle()
        if self._disagreements is not None:
            self._disagreements.catch_up()
        if not watched.stepped:
            self._look_without_optimizer(watched)
        elif self._writes.is_tracking(watched):
            self._writes.forward(watched, self._sample(watched))

    def backward_begun(self, watched: TrackedModule) -> None:
        if self._writes.is_tracking(watched):
            self._writes.backward(watched, self._sample(watched))

    def stray_begun(self, watched: TrackedModule) -> None:
        """Who goes around the wrapper comes to no forward of it; updates by hand show here then."""
        if not watched.stepped:
            self._look_without_optimizer(watched)

    def buffers_synced(self, watched: TrackedModule) -> None:
        if watched.syncs % self.scene.config.every == 0:
            self._look(SnapshotKey(watched, Stage.BUFFERS, TensorKind.BUFFERS, watched.syncs))
            self._outdate(watched, TensorKind.BUFFERS)

    def before_step(self, optimizer: TrackedOptimizer) -> None:
        self._settle()
        if self._disagreements is not None:
            self._disagreements.catch_up()
        for watched in optimizer.modules:
            before, marks = self._marks.get(watched.index), self._sample(watched)
            if marks != before:
                moment = SnapshotKey(
                    watched, Stage.REWRITTEN, TensorKind.PARAMETERS, optimizer.steps, optimizer.index
                )
                self._look(moment, marks=marks, how=self._writes.window(watched, before))
            self._outdate(watched, TensorKind.PARAMETERS)
        # All modules: GANs run one through another's step.
        for (index, of), look in self._last.items():
            if of is TensorKind.BUFFERS:
                self._buffer_marks[index] = _written(look.moment.watched)

    def after_step(self, optimizer: TrackedOptimizer) -> None:
        for watched in optimizer.modules:
            watched.stepped = True
            self._held.pop(watched.index, None)
            marks = self._marks[watched.index] = self._sample(watched)
            if optimizer.steps % self.scene.config.every == 0:
                moment = SnapshotKey(
                    watched, Stage.PARAMS, TensorKind.PARAMETERS, optimizer.steps, optimizer.index
                )
                self._look(moment, self._places(optimizer, watched), hyper=optimizer.hyper, marks=marks)

    def forgetting(self, watched: TrackedModule) -> None:
        if self._ended:
            return
        self._look_at_last_buffers(watched)
        if not watched.stepped and not self._wrapped_anew(watched):
            self._look_for_the_last_time(watched)

    def ending(self) -> None:
        self._ended = True
        self._settle(wait=True)
        deadline = time.monotonic() + LINGER_SECONDS
        for (_, of), look in list(self._last.items()):
            watched = look.moment.watched
            if not watched.parameters:
                continue
            if of is TensorKind.BUFFERS:
                self._look_at_last_buffers(watched)
            elif not watched.stepped:
                self._look_for_the_last_time(watched)
            look = self._last[watched.index, of]
            if self._disagreements is None or look.number < 0:
                continue
            if of is TensorKind.PARAMETERS:
                self._disagreements.linger(look, deadline)
            elif look.moment.stage is Stage.BUFFERS_END:
                self._disagreements.linger(look, min(deadline, time.monotonic() + SHORT_LINGER_SECONDS))
        if self._disagreements is not None:
            self._disagreements.part(deadline)

    def _look_at_last_buffers(self, watched: TrackedModule) -> None:
        """After a training forward BatchNorm's statistics rightly differ; what is written later should not.

        A forward without a step, as at the end of gradient accumulation, hides the one behind the other.
        """
        before = self._buffer_marks.get(watched.index)
        now = _written(watched)
        places, how = watched.kept_buffers(), ""
        if before is None or before == now or before[0] != now[0]:
            if not watched.forwards or not _left_alone(watched):
                return
            # Statistics of normalisation are a rank's own then, as everybody knows; a codebook or a queue is not.
            places = [place for place in places if watched.buffers[place].key not in STATISTICS]
            how = LEFT_ALONE
        if places:
            self._look(SnapshotKey(watched, Stage.BUFFERS_END, TensorKind.BUFFERS, -1), places, how=how)

    def _look_without_optimizer(self, watched: TrackedModule) -> None:
        """Without an optimizer: a hand-written update shows as a change between two forwards."""
        if (watched.index, TensorKind.PARAMETERS) in self._last and watched.parameters:
            stage = Stage.PARAMS if watched.forwards else Stage.REWRITTEN
            how = watched.backward.came_to() if watched.backward is not None and watched.forwards else ""
            self._look(
                SnapshotKey(watched, stage, TensorKind.PARAMETERS, watched.steps), only_changes=True, how=how
            )

    def _look_for_the_last_time(self, watched: TrackedModule) -> None:
        """An update by hand after the last forward, and one that nothing has followed."""
        self._look_without_optimizer(watched)
        self._settle(wait=True)
        held = self._held.pop(watched.index, None)
        if held is not None:
            self._keep(held)

    def _wrapped_anew(self, watched: TrackedModule) -> bool:
        """Whether a later wrapper trains the same parameters: ranks may let go of the old one at any time."""
        mine = set(map(id, watched.tensors(watched.parameters)))
        later = [
            look.moment.watched for look in self._last.values() if look.moment.watched.index > watched.index
        ]
        return any(id(tensor) in mine for other in later for tensor in other.tensors(other.parameters))

    def _places(self, optimizer: TrackedOptimizer, watched: TrackedModule) -> list[int] | None:
        """What to read after this step; None: all. What another optimizer steps, its own look covers."""
        others = watched.owners.keys() - {optimizer.index}
        last = self._last.get((watched.index, TensorKind.PARAMETERS))
        if not others or last is None or len(last.leaves) != len(watched.parameters):
            return None
        elsewhere = set().union(*(watched.owners[other] for other in others)) - optimizer.owned(watched)
        return [place for place in range(len(watched.parameters)) if place not in elsewhere]

    def _look(
        self,
        moment: SnapshotKey,
        places: list[int] | None = None,
        only_changes: bool = False,
        hyper: str = "",
        marks: TensorSamples | None = None,
        how: str = "",
    ) -> None:
        watched = moment.watched
        slots = watched.buffers if moment.of is TensorKind.BUFFERS else watched.parameters
        tensors = watched.tensors(slots)
        if not tensors:
            return
        ticket = submit(tensors if places is None else [tensors[place] for place in places])
        samples = (marks or self._sample(watched, moment.of)).packed()
        pending = PendingDigest(ticket, moment, places, samples, only_changes, hyper, how, watched.forwards)
        if self._pending or not ticket.ready():
            self._pending.append(pending)
        else:
            self._finish(pending, current=True)

    def _sample(self, watched: TrackedModule, of: TensorKind = TensorKind.PARAMETERS) -> TensorSamples:
        sampler = self._samplers.setdefault((watched.index, of), TensorSampler())
        return sampler.take(
            watched.tensors(watched.buffers if of is TensorKind.BUFFERS else watched.parameters)
        )

    def _settle(self, wait: bool = False) -> None:
        """Take in digests that have arrived from a device; in the training loop nothing waits for them."""
        while self._pending and (wait or self._pending[0].ticket.ready()):
            self._finish(self._pending.popleft(), current=False)

    def _finish(self, pending: PendingDigest, current: bool) -> None:
        moment = pending.moment
        slot = (moment.watched.index, moment.of)
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
        watched = moment.watched
        held = self._held.get(watched.index)
        if last is not None and now.root == (last.root if held is None else held.root):
            return False
        if watched.backward is not None:
            watched.backward.close_window()
        if moment.stage is not Stage.PARAMS or watched.index in self._by_hand:
            return True
        if held is None:
            self._held[watched.index] = now
            return False
        del self._held[watched.index]
        if last is not None and now.root == last.root:
            return False
        self._by_hand.add(watched.index)
        self._keep(held._replace(current=False))
        return True

    def _keep(self, change: ParameterWrite) -> None:
        pending, moment = change.pending, change.pending.moment
        slot = (moment.watched.index, moment.of)
        if pending.only_changes:
            moment = replace(moment, step=moment.watched.steps)
            moment.watched.steps += moment.stage is Stage.PARAMS
        last = self._last.get(slot)
        if last is not None:
            last.current = False
        key = moment.key(self.scene.session)
        look = Snapshot(moment, key, change.root, change.leaves, pending.samples, current=change.current)
        self._last[slot] = look
        self._record(look, pending)

    def _record(self, look: Snapshot, pending: PendingDigest) -> None:
        moment = look.moment
        width = WIDTH.get(moment.stage, NARROW)
        self.scene.write(
            DigestRecord(
                module=moment.watched.index,
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
        if self._disagreements is not None and not (
            moment.watched.loose or moment.stage is Stage.INIT_BEFORE
        ):
            self._disagreements.publish(look)

    def _outdate(self, watched: TrackedModule, of: TensorKind) -> None:
        """From here on the tensors may change: what was looked at can no longer be captured."""
        look = self._last.get((watched.index, of))
        if look is not None:
            look.current = False


def _left_alone(watched: TrackedModule) -> bool:
    """Whether DDP was told not to synchronise buffers in the forward."""
    return any(watched.options.get(name) is False for name in ("broadcast_buffers", "forward_sync_buffers"))


def _written(watched: TrackedModule) -> tuple[int, list[tuple[int, int]]]:
    """Changes with every write to a buffer that autograd can see, and with every training forward."""
    tensors = watched.tensors(watched.buffers)
    return watched.forwards, [(id(tensor), version_of(tensor)) for tensor in tensors]
