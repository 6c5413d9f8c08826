"""Notes at each checkpoint how far the training data had come, and compares it with where a resumed job begins.

The note is a small file in the run folder, never beside the checkpoint. It is found again by the size and the
modification time of the checkpoint, in this run folder and in those next to it.
"""

from __future__ import annotations

import hashlib
import json
import os
import weakref
from array import array
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ddpcheck import torch_compat
from ddpcheck.privacy import mask_text
from ddpcheck.probes.checkpoints.tracker import CHECKPOINTS, CheckpointFile, file_key
from ddpcheck.probes.probe import Probe, ProbeContext
from ddpcheck.probes.process.callsite import user_callsite
from ddpcheck.probes.samples.draws import facts_of
from ddpcheck.records.kinds.checkpoints import ResumedDataRecord, SaveRecord, StateKind

if TYPE_CHECKING:
    from ddpcheck.agent.tracked_module import TrackedModule
    from ddpcheck.agent.tracked_optimizer import TrackedOptimizer

# Indices that identify the order of a pass.
HEAD = 16
MOST_HEADS = 64
MOST_SAVES = 200
# Run folders next to this one in which the note of a checkpoint is looked for.
MOST_FOLDERS = 64
NOTES = "checkpoints"


class DataPass:
    """One pass over a loader, from its first draw on."""

    def __init__(self, iterator: Any) -> None:
        facts = facts_of(torch_compat.read(torch_compat.INDEX_SAMPLER, iterator))
        epoch = facts.get("epoch")
        self.epoch: int | None = epoch if type(epoch) is int else None
        self.shuffles = facts.get("shuffle") is True
        self.iterator: weakref.ref[Any] = weakref.ref(iterator)
        self.drawn = 0
        self.exhausted = False
        # Batches that were taken and not used before the first one that was.
        self.passed_over = 0
        self._yielded = 0
        self._indices: array[int] | None = array("q")

    def add(self, index: Any) -> None:
        self.drawn += 1
        if self._indices is None or len(self._indices) >= HEAD:
            return
        try:
            self._indices.extend(index if isinstance(index, (list, tuple)) else [index])
        except (TypeError, OverflowError):
            self._indices = None

    @property
    def head(self) -> str:
        """A digest of the first indices; empty if there are too few or if they are no integers."""
        if self._indices is None or len(self._indices) < HEAD:
            return ""
        return hashlib.blake2b(self._indices[:HEAD].tobytes(), digest_size=8).hexdigest()

    def yielded(self) -> int:
        iterator = self.iterator()
        if iterator is not None:
            self._yielded = max(self._yielded, torch_compat.read(torch_compat.NUM_YIELDED, iterator, 0))
        return self._yielded

    def left(self) -> int:
        """How many batches of the pass were not taken yet; 0 where that is not known."""
        batches = torch_compat.read(torch_compat.INDEX_SAMPLER, self.iterator())
        try:
            return max(0, len(batches) - self.yielded())
        except TypeError:
            return 0

    def over(self) -> bool:
        return self.exhausted and self.yielded() >= self.drawn


class ResumedDataProbe(Probe):
    """Follows the passes over the loader that feeds the training."""

    name = "resumed_data"
    # Once a data loader was used.
    on_demand: ClassVar[frozenset[str]] = frozenset({"forward_inputs"})

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._passes: weakref.WeakKeyDictionary[Any, DataPass] = weakref.WeakKeyDictionary()
        self._received: weakref.ref[Any] | None = None
        self._uses_loader = False
        self._current: DataPass | None = None
        self._finished: deque[tuple[int | None, str]] = deque(maxlen=MOST_HEADS)
        self._finished_count = 0
        self._module = 0
        self._step = 0
        self._compared = False
        self._saves = 0
        CHECKPOINTS.on_saved = self._saved

    def sample_drawn(self, iterator: Any, index: Any) -> None:
        current = self._passes.get(iterator)
        if current is None or current.exhausted:
            current = self._passes[iterator] = DataPass(iterator)
        current.add(index)

    def sampler_exhausted(self, iterator: Any) -> None:
        current = self._passes.get(iterator)
        if current is not None:
            current.exhausted = True

    def batch_received(self, iterator: Any) -> None:
        self._received = weakref.ref(iterator)
        if not self._uses_loader:
            self._uses_loader = True
            self.context.call(self, Probe.forward_inputs)

    def forward_inputs(self, tracked: TrackedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A training forward uses the last batch: it belongs to the pass that is trained on."""
        received, self._received = self._received, None
        iterator = received() if received is not None else None
        if iterator is None:
            return
        fed = self._passes.get(iterator)
        if fed is not self._current and fed is not None:
            ddp = tracked.ddp()
            if ddp is not None and not ddp.training:
                return
            self._close()
            self._current, self._module = fed, tracked.index
            fed.passed_over = max(0, fed.yielded() - 1)

    def _close(self) -> None:
        """Another pass begins."""
        if self._current is not None:
            self._finished.append((self._current.epoch, self._current.head))
            self._finished_count += 1

    def after_step(self, optimizer: TrackedOptimizer) -> None:
        self._step = optimizer.steps + 1
        if self._compared or self._current is None:
            return
        head = self._current.head
        if not head and not self._current.exhausted:
            return
        self._compared = True
        # Of a job that saves and loads in one process, the passes go on.
        files = [load.file for load in CHECKPOINTS.modules]
        if head and files and not self._finished_count and self._current.shuffles:
            self._compare(files[-1], self._current, optimizer.steps)

    def _compare(self, file: CheckpointFile, current: DataPass, step: int) -> None:
        note = self._note(file.key)
        if note is None or note.get("rank") != self.context.rank:
            return
        if note.get("world_size") != self.context.world_size:
            return
        finished = note.get("finished", [])
        first = note.get("finished_count", 0) - len(finished)
        matches = [first + number for number, (_, head) in enumerate(finished) if head == current.head]
        open_head, open_batches = note.get("open", ["", 0])
        in_progress = bool(open_head == current.head and open_batches)
        if in_progress and current.passed_over == open_batches:
            # The pass goes on where it was.
            return
        epoch = note.get("epoch")
        next_epoch = epoch is not None and current.epoch == epoch + 1 and not current.passed_over
        self.context.write(
            ResumedDataRecord(
                module=self._module,
                step=step,
                file=file.path,
                saved_epoch=note.get("epoch"),
                saved_passes=note.get("finished_count", 0),
                saved_batches=open_batches,
                epoch=current.epoch,
                repeats=note.get("finished_count", 0) if in_progress else (matches or [-1])[-1],
                in_progress=in_progress,
                passed_over=current.passed_over,
                left_out=note.get("left", 0) if next_epoch and not in_progress and not matches else 0,
            )
        )

    def _note(self, key: str) -> dict[str, Any] | None:
        """The note that was written when the file was saved; None if no watched job of these folders saved it."""
        if not key:
            return None
        own = Path(self.context.config.run_dir)
        others = sorted(own.parent.glob(f"*/{NOTES}/{key}.json"))[-MOST_FOLDERS:]
        for path in (own / NOTES / f"{key}.json", *reversed(others)):
            try:
                note = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue
            return note if isinstance(note, dict) else None
        return None

    def _saved(self, path: str, kinds: set[StateKind]) -> None:
        if self._saves >= MOST_SAVES:
            return
        self._saves += 1
        holds = sorted(kind.value for kind in kinds)
        self.context.write(SaveRecord(self._step, mask_text(path), holds, user_callsite()))
        key = file_key(path)
        if StateKind.OPTIMIZER not in kinds or self._current is None or not key:
            return
        finished, count = list(self._finished), self._finished_count
        is_open = ("", 0)
        if self._current.over():
            finished.append((self._current.epoch, self._current.head))
            count += 1
        else:
            is_open = (self._current.head, self._current.yielded())
        note = {
            "rank": self.context.rank,
            "world_size": self.context.world_size,
            "step": self._step,
            "epoch": self._current.epoch,
            "finished": finished,
            "finished_count": count,
            "open": is_open,
            "left": self._current.left() if is_open[1] else 0,
        }
        folder = Path(self.context.config.run_dir) / NOTES
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(folder / f"{key}.json", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(descriptor, "w", encoding="utf-8") as out:
                json.dump(note, out)
        except OSError:
            pass  # a full disk: a resumed job is not compared with this one

    def before_exit(self) -> None:
        if CHECKPOINTS.on_saved == self._saved:
            CHECKPOINTS.on_saved = None
