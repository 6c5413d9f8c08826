"""Hands one micro-batch over to other ranks at every N-th step, and computes the local gradients of theirs again.

No rank waits for another one. A rank writes its file when its backward begins. DDP's AllReduce ends after every rank
has contributed its gradients, so the file is there when the backward of another rank returns, and the parameters are
still those of the forward: that is where ranks replay. What is not there then, as on another node without shared
storage, is not audited.
"""

from __future__ import annotations

import base64
import hashlib
import os
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ddpcheck import device_api, torch_compat
from ddpcheck.config import parse_audit
from ddpcheck.probes.probe import Probe, ProbeContext
from ddpcheck.probes.replay.capture import Capture, CaptureEntries, why_not_auditable
from ddpcheck.probes.replay.module_state import CollectiveInReplayError
from ddpcheck.probes.replay.replayer import (
    DamagedPayloadError,
    ParametersDifferError,
    environment,
    is_deterministic,
    replay,
    scan_gradients,
)
from ddpcheck.probes.scan.scanner import sketch_text
from ddpcheck.probes.scan.table import NUMBERS
from ddpcheck.records.kinds.audit import AUDIT_FOLDER, AuditRecord, GradientVote
from ddpcheck.records.reasons import AuditSkip
from ddpcheck.step_ranges import parse_steps

if TYPE_CHECKING:
    from ddpcheck.agent.tracked_module import TrackedModule
    from ddpcheck.agent.tracked_optimizer import TrackedOptimizer
    from ddpcheck.config import Config
    from ddpcheck.probes.digest import DigestFuture
    from ddpcheck.probes.scan.scanner import Scan

_LEAF = 8
# Ranks of a node audit each other if they are enough for a majority.
_FEWEST_FOR_MAJORITY = 3
# Forwards of one step that are captured because no backward followed the one before.
_MOST_FORWARDS = 4


@dataclass
class Vote:
    """One gradient whose digests may still be computed on a device."""

    source: int
    outputs: DigestFuture | None = None
    parts: list[tuple[Sequence[int], Scan]] = field(default_factory=list)
    skip: AuditSkip | None = None
    detail: str = ""

    def ready(self) -> bool:
        scans = all(scan.ready() for _, scan in self.parts)
        return self.skip is not None or (scans and (self.outputs is None or self.outputs.ready()))

    def to_row(self, count: int) -> list[Any]:
        """`count`: the number of parameters."""
        if self.skip is not None or self.outputs is None:
            reason = self.skip or AuditSkip.NO_BACKWARD
            return GradientVote(self.source, reason=reason.value, detail=self.detail).to_row()
        leaves, sketches = self._merged(count)
        outputs = hashlib.blake2b(b"".join(self.outputs.result()), digest_size=8).hexdigest()
        return GradientVote(
            self.source, outputs, base64.b64encode(leaves).decode(), sketch_text(sketches)
        ).to_row()

    def _merged(self, count: int) -> tuple[bytes, array[float]]:
        leaves, numbers = bytearray(_LEAF * count), array("d", bytes(8 * NUMBERS * count))
        for indices, scan in self.parts:
            narrow, part = scan.leaves().narrow(_LEAF), scan.numbers()
            for row, index in enumerate(indices):
                leaves[_LEAF * index : _LEAF * (index + 1)] = narrow[_LEAF * row : _LEAF * (row + 1)]
                numbers[NUMBERS * index : NUMBERS * (index + 1)] = part[NUMBERS * row : NUMBERS * (row + 1)]
        return bytes(leaves), numbers


@dataclass
class Audit:
    """One audited step of a module on this rank."""

    tracked: TrackedModule
    step: int
    own: Vote
    devices: list[torch.device]
    revision: int
    spent: int
    capture: Capture | None = None
    forwards: int = 1
    # Whether the backward of the captured forward runs, and whether its gradients are complete.
    in_backward: bool = False
    computed: bool = False
    size: int = 0
    replays: list[Vote] = field(default_factory=list)

    @property
    def awaits_backward(self) -> bool:
        return self.capture is not None and not self.in_backward and not self.computed


class AuditProbe(Probe):
    """Audits the first micro-batch of each N-th step of every DDP module."""

    name = "audit"

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._every = parse_audit(context.config.audit)
        self._profiled = parse_steps(context.config.profile)
        self._folder = Path(context.config.run_dir) / AUDIT_FOLDER
        # By module: the audit of its latest audited step.
        self._audits: dict[int, Audit] = {}
        self._due: list[Audit] = []
        # Modules whose replay failed: it would fail again.
        self._refused: dict[int, tuple[AuditSkip, str]] = {}
        # By module: the files that this rank handed over last, which others may still read.
        self._files: dict[int, list[Path]] = {}
        self._pending: deque[tuple[Callable[[], bool], Callable[[], None]]] = deque()
        self._depth = 0
        self._entries = CaptureEntries(
            context.entry_point(self, "inputs", Capture.on_inputs),
            context.entry_point(self, "outputs", Capture.on_outputs),
            context.entry_point(self, "output_gradient", Capture.on_gradient),
        )

    @classmethod
    def wanted(cls, config: Config) -> bool:
        return bool(config.audit) and config.gradients != "off"

    def before_forward(self, tracked: TrackedModule) -> None:
        # A backward that raised never returned.
        self._depth = 0
        self._drain()

    def forward_inputs(self, tracked: TrackedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        step = tracked.steps
        audit = self._audits.get(tracked.index)
        if audit is not None:
            if audit.capture is not None:
                # Also after a forward that raised.
                audit.capture.end_forward()
            if audit.step == step:
                self._recapture(audit)
                return
            self._finish(audit)
        if not self._every or tracked.backward is None or step % self._every or step in self._profiled:
            return
        module = tracked.module()
        if module is None:
            return
        began = self.context.probe_ns().get(self.name, 0)
        devices = device_api.devices_of(tracked.parameter_tensors())
        audit = self._audits[tracked.index] = Audit(
            tracked, step, Vote(self.context.rank), devices, tracked.changes_since_wrapping, began
        )
        refused = self._refused.get(tracked.index)
        if refused is not None:
            audit.own.skip, audit.own.detail = refused
            return
        audit.own.skip = why_not_auditable(tracked, module)
        if audit.own.skip is None:
            audit.capture = Capture(tracked, module, devices, self._entries)

    def _recapture(self, audit: Audit) -> None:
        """Another forward of the same step. The loss may not use the one before, as that of a discriminator.

        If it does, the search of its graph finds parameters that it reaches without the outputs of this forward.
        """
        module = audit.tracked.module()
        if module is None or audit.capture is None or not audit.awaits_backward:
            return
        audit.capture.release()
        audit.forwards += 1
        if audit.forwards > _MOST_FORWARDS:
            audit.own.skip = AuditSkip.SEVERAL_FORWARDS
        elif audit.own.skip is None:
            audit.capture = Capture(audit.tracked, module, audit.devices, self._entries)

    def after_forward(self, tracked: TrackedModule) -> None:
        audit = self._audits.get(tracked.index)
        if audit is not None and audit.capture is not None:
            audit.capture.end_forward()

    def backward_called(self, root: Any) -> None:
        self._depth += 1
        if self._depth == 1:
            for audit in self._audits.values():
                if audit.awaits_backward and audit.capture is not None:
                    audit.capture.backward_called(root)

    def backward_begun(self, tracked: TrackedModule) -> None:
        audit = self._audits.get(tracked.index)
        if audit is None or audit.capture is None or not audit.awaits_backward:
            return
        audit.in_backward = True
        if audit.own.skip is None:
            audit.size = audit.capture.write(self._hand_over(audit), self._identity(audit))

    unsynced_backward_begun = backward_begun

    def gradients_ready(
        self, tracked: TrackedModule, indices: Sequence[int], gradients: Sequence[torch.Tensor | None]
    ) -> None:
        audit = self._audits.get(tracked.index)
        if audit is not None and audit.in_backward and not audit.computed and audit.size:
            audit.own.parts.append((indices, scan_gradients(gradients)))

    def gradients_computed(self, tracked: TrackedModule) -> None:
        audit = self._audits.get(tracked.index)
        if audit is not None and audit.in_backward:
            audit.computed = True

    def unsynced_gradients_ready(self, tracked: TrackedModule) -> None:
        gradients = tracked.gradients()
        self.gradients_ready(tracked, range(len(gradients)), gradients)
        self.gradients_computed(tracked)

    def gradients_reduced(self, tracked: TrackedModule) -> None:
        audit = self._audits.get(tracked.index)
        if audit is not None and audit.step == tracked.steps and not audit.replays and audit not in self._due:
            self._due.append(audit)

    def backward_returned(self) -> None:
        self._depth = max(0, self._depth - 1)
        if self._depth or not self._due:
            return
        due, self._due = self._due, []
        for audit in due:
            audit.replays = [
                self._replay(audit, source)
                for source in audited_by(audit.tracked.group, self.context.rank, os.environ)
            ]

    def after_step(self, optimizer: TrackedOptimizer) -> None:
        self._due.clear()
        for tracked in optimizer.modules:
            audit = self._audits.get(tracked.index)
            if audit is not None:
                self._finish(audit)
        self._drain()

    def wrapper_released(self, tracked: TrackedModule) -> None:
        audit = self._audits.pop(tracked.index, None)
        if audit is not None:
            self._finish(audit)

    def before_exit(self) -> None:
        for audit in list(self._audits.values()):
            self._finish(audit)
        # The last file stays: another rank may still read it.
        self._drain(wait=True)

    # Files.

    def _identity(self, audit: Audit) -> dict[str, Any]:
        return {"module": audit.tracked.key, "step": audit.step, "session": self.context.session}

    def _path(self, audit: Audit, source: int) -> Path:
        module = hashlib.blake2b(audit.tracked.key.encode(), digest_size=4).hexdigest()
        start = self.context.session[:8]
        return self._folder / f"{start}-{module}-step-{audit.step:08d}-rank-{source:05d}.safetensors"

    def _hand_over(self, audit: Audit) -> Path:
        """The path of this rank's file.

        Another rank may be at its replays of the audit before. It has ended those of the one before that: since then it
        took part in an AllReduce.
        """
        files = self._files.setdefault(audit.tracked.index, [])
        if len(files) > 1:
            files.pop(0).unlink(missing_ok=True)
        files.append(self._path(audit, self.context.rank))
        return files[-1]

    # Replays.

    def _replay(self, audit: Audit, source: int) -> Vote:
        vote = Vote(source)
        tracked, capture = audit.tracked, audit.capture
        module = tracked.module()
        if tracked.index in self._refused:
            vote.skip, vote.detail = self._refused[tracked.index]
            return vote
        if capture is None or module is None or not capture.parameters:
            skip = audit.own.skip or (capture.skip if capture is not None else None)
            vote.skip, vote.detail = skip or AuditSkip.NO_BACKWARD, audit.own.detail
            return vote
        if capture.versions != torch_compat.tensor_versions(tracked.parameter_tensors()):
            vote.skip = AuditSkip.PARAMETERS_WRITTEN
            return vote
        try:
            path, identity = self._path(audit, source), self._identity(audit)
            replayed = replay(
                tracked, module, path, identity, capture.parameters, audit.devices, capture.default_device
            )
        except FileNotFoundError:
            vote.skip = AuditSkip.NOT_HANDED_OVER
        except DamagedPayloadError:
            vote.skip = AuditSkip.UNREADABLE
        except ParametersDifferError:
            vote.skip = AuditSkip.PARAMETERS_DIFFER
        except CollectiveInReplayError:
            vote.skip = AuditSkip.COLLECTIVES
        except Exception as error:
            # Of the program's own code, or of a device without memory for a second forward.
            vote.skip, vote.detail = AuditSkip.RAISED, type(error).__name__
        else:
            vote.outputs = replayed.outputs
            vote.parts.append((range(len(tracked.parameters)), replayed.gradients))
        if vote.skip in (AuditSkip.COLLECTIVES, AuditSkip.RAISED):
            self._refused[tracked.index] = vote.skip, vote.detail
        return vote

    # Records.

    def _finish(self, audit: Audit) -> None:
        """Nothing more can be added to the audit: write its record when it is complete."""
        if self._audits.pop(audit.tracked.index, None) is None:
            return
        capture, own = audit.capture, audit.own
        excluded: list[int] = []
        if capture is not None:
            capture.release()
            own.skip = own.skip or capture.skip
            own.outputs = capture.outputs if audit.computed and audit.size else None
            excluded = sorted(capture.excluded)
        if own.skip is None and not audit.computed:
            own.skip = AuditSkip.NO_BACKWARD
        votes = [own, *audit.replays]
        count = len(audit.tracked.parameters)
        record = AuditRecord(
            module=audit.tracked.index,
            step=audit.step,
            excluded=excluded,
            environment=environment(audit.devices),
            deterministic=is_deterministic(audit.devices),
            dtype=_coarsest(audit),
            bytes=audit.size,
            microseconds=(self.context.probe_ns().get(self.name, 0) - audit.spent) // 1000,
            revision=audit.revision,
        )

        def write() -> None:
            rows = [vote.to_row(count) for vote in votes]
            self.context.write(replace(record, votes=rows))

        self._pending.append((lambda: all(vote.ready() for vote in votes), write))

    def _drain(self, wait: bool = False) -> None:
        """Write the records that are complete; waits for a device only at the end."""
        while self._pending and (wait or self._pending[0][0]()):
            self._pending.popleft()[1]()


def audited_by(group: Sequence[int], rank: int, environ: Any) -> list[int]:
    """The ranks whose gradients `rank` computes again: two others, so that each has two; or the other one and its own.

    They are on the same node if it has three ranks: then their files are there, and they are the fastest to read.
    """
    ring = list(group)
    try:
        first = rank - int(environ["LOCAL_RANK"])
        here = [each for each in group if first <= each < first + int(environ["LOCAL_WORLD_SIZE"])]
    except (KeyError, ValueError):
        here = []
    if len(here) >= _FEWEST_FOR_MAJORITY and rank in here:
        ring = here
    position = ring.index(rank)
    return list(dict.fromkeys(ring[(position + offset) % len(ring)] for offset in (1, 2)))


def _coarsest(audit: Audit) -> str:
    """The floating-point dtype with the fewest digits that the module's parameters or autocast use."""
    dtypes = {tensor.dtype for tensor in audit.tracked.parameter_tensors() if tensor.is_floating_point()}
    if audit.capture is not None:
        dtypes |= audit.capture.autocast_dtypes
    coarsest = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)
    return str(coarsest).removeprefix("torch.")
