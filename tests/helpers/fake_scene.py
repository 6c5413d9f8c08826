"""A rank for tests of the probes: one process, no process group, records kept in a list."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpcheck.agent.dispatcher import Dispatcher
from ddpcheck.agent.tracked_module import TrackedModule
from ddpcheck.config import Config
from ddpcheck.probes.live_compare.node import NodeCompare
from ddpcheck.probes.probe import Probe
from ddpcheck.probes.roster import PROBES
from ddpcheck.records.schema import DigestRecord, Record, Stage

Kind = TypeVar("Kind", bound=Record)


class FakeScene:
    """What a probe may know of its rank; also stands in for the session, without its guard."""

    def __init__(
        self, folder: Path = Path("/nonexistent"), rank: int = 0, board: Any = None, **config: Any
    ) -> None:
        # Nobody asks where it stands, unless a test says so.
        self.config = Config(run_dir=str(folder), run_id="test", **{"hang_timeout": 0.0, **config})
        self.session = "0123456789abcdef"
        self.rank = rank
        self.world_size = 2
        self.own_ns = 0
        self.over = False
        self.records: list[Record] = []
        self.board = board
        self.disagreements = NodeCompare(self, board) if board is not None else None
        self.probes: list[Probe] = []

    def write(self, record: Record) -> None:
        self.records.append(record)

    def tell(self, moment: str, *what: Any) -> None:
        for probe in self.probes:
            getattr(probe, moment)(*what)

    def of(self, kind: type[Kind]) -> list[Kind]:
        return [record for record in self.records if isinstance(record, kind)]

    def digests(self, stage: Stage) -> list[DigestRecord]:
        return [record for record in self.of(DigestRecord) if record.stage == stage.value]


def watch(module: torch.nn.Module, ignored: Sequence[str] = (), index: int = 0) -> TrackedModule:
    """`module` as if DDP had wrapped it."""
    return TrackedModule(
        index=index,
        ordinal=index,
        group=(0, 1),
        module=weakref.ref(module),
        ddp=weakref.ref(module),
        ignored=frozenset(ignored),
        name=type(module).__name__,
    )


class Job:
    """A module trained under the probes; the module stands in for its own DDP wrapper."""

    def __init__(
        self, module: torch.nn.Module, scene: FakeScene, probes: Sequence[type[Probe]] = PROBES
    ) -> None:
        self.module = module
        self.scene = scene
        if not scene.probes:
            scene.probes = [probe(scene) for probe in probes]
        self.watcher = Dispatcher(scene, DistributedDataParallel.__init__)  # type: ignore[arg-type]
        self.watched = watch(module)
        self.watcher._modules[module] = self.watched
        scene.tell("entering", self.watched)

    def wrapped(self) -> Job:
        self.watcher.wrapped(self.module)
        return self

    def forward(self, *inputs: torch.Tensor) -> Any:
        self.watcher.forward(self.module)
        self.watcher.buffers_synced(self.module)
        return self.module(*inputs) if inputs else None

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        self.watcher.before_step(optimizer)
        optimizer.step()
        self.watcher.after_step(optimizer)

    def train(self, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
        """Steps with gradients made up here: what they are does not matter to the probes."""
        for _ in range(steps):
            self.forward()
            for parameter in self.module.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.full_like(parameter, 0.25)
            self.step(optimizer)
