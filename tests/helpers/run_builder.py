"""Builds small run folders from real record files, for tests of the analysis."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddpcheck.analysis.finding import Finding
from ddpcheck.analysis.report import Report
from ddpcheck.analysis.report_builder import analyse_run
from ddpcheck.probes.sketches.sketch import Sketch
from ddpcheck.records.codecs import distribute, pack
from ddpcheck.records.kinds.coverage import StepCoverageRecord, TrainingRecord
from ddpcheck.records.kinds.digests import CaptureRecord, DetailRecord, DigestRecord, Stage, TensorKind
from ddpcheck.records.kinds.gradients import AppliedRecord, BackwardRecord
from ddpcheck.records.kinds.modules import HyperRecord, ModuleRecord, OptimizerRecord
from ddpcheck.records.kinds.rank import EndRecord, RankHeader
from ddpcheck.records.registry import Record, to_line

NAMES = ("body.weight", "body.bias", "head.weight")
# Names of the tensors that differ from those of other ranks, by rank.
Outliers = Mapping[int, Collection[str]]


class RunBuilder:
    """One attempt of a job. `save` writes the folder, `report` analyses it."""

    def __init__(
        self, folder: Path, world_size: int, session: str = "a1", algorithm: str = "xxh3-128"
    ) -> None:
        self.folder = folder
        self.world_size = world_size
        self.session = session
        self._paths: dict[int, Path] = {}
        self.description: dict[str, Any] = {
            "command": ["torchrun", "train.py"],
            "exit_code": 0,
            "ended": "now",
        }
        self.notes: list[dict[str, Any]] = []
        self.records: dict[int, list[Record]] = {
            rank: [self._header(rank, algorithm)] for rank in range(world_size)
        }

    def _header(self, rank: int, algorithm: str) -> RankHeader:
        return RankHeader(
            rank=rank,
            world_size=self.world_size,
            host="node0",
            pid=100 + rank,
            ticks=5000 + rank,
            session=self.session,
            time=1000.0,
            local_rank=rank,
            torch="2.13.0",
            algorithm=algorithm,
        )

    @property
    def ranks(self) -> range:
        return range(self.world_size)

    def add(self, rank: int, record: Record) -> None:
        self.records[rank].append(record)

    def rows(self, names: Sequence[str]) -> list[list[Any]]:
        return [[name, "float32", [4], 1] for name in names]

    def wrap(
        self,
        names: Sequence[str] = NAMES,
        buffers: Sequence[str] = (),
        *,
        module: int = 0,
        group: Sequence[int] | None = None,
        names_on: Mapping[int, Sequence[str]] | None = None,
        buffers_on: Mapping[int, Sequence[str]] | None = None,
        outliers_before: Outliers | None = None,
        outliers: Outliers | None = None,
        buffer_outliers: Outliers | None = None,
        options: Mapping[str, Any] | None = None,
        ignored: Sequence[str] = (),
    ) -> RunBuilder:
        """Every rank wraps a module. `names_on` gives some ranks other names."""
        group = list(self.ranks if group is None else group)
        for rank in group:
            record = ModuleRecord(
                module=module,
                name="Net",
                group=group,
                ordinal=module,
                parameters=self.rows((names_on or {}).get(rank, names)),
                ignored=list(ignored),
                buffers=self.rows((buffers_on or {}).get(rank, buffers)),
                options=dict(options or {}),
            )
            self.add(rank, record)
        self.snapshot(
            Stage.INIT_BEFORE, -1, names, outliers=outliers_before, width=8, module=module, ranks=group
        )
        self.snapshot(Stage.INIT_AFTER, -1, names, outliers=outliers, width=8, module=module, ranks=group)
        if buffers:
            self.snapshot(
                Stage.INIT_AFTER,
                -1,
                buffers,
                of=TensorKind.BUFFERS,
                outliers=buffer_outliers,
                width=8,
                module=module,
                ranks=group,
            )
        return self

    def snapshot(
        self,
        stage: Stage,
        step: int,
        names: Sequence[str] = NAMES,
        *,
        of: TensorKind = TensorKind.PARAMETERS,
        outliers: Outliers | None = None,
        width: int = 2,
        module: int = 0,
        optimizer: int | None = None,
        forward: Mapping[int, int] | None = None,
        hyper: Mapping[int, str] | None = None,
        how: str = "",
        ranks: Collection[int] | None = None,
    ) -> RunBuilder:
        for rank in self.ranks if ranks is None else ranks:
            leaves = leaves_of(names, step, rank, (outliers or {}).get(rank, ()))
            record = DigestRecord(
                module=module,
                stage=stage.value,
                step=step,
                root=hashlib.blake2b(b"".join(leaves), digest_size=16).hexdigest(),
                leaves=packed(leaves, width),
                width=width,
                of=of.value,
                optimizer=optimizer,
                forward=(forward or {}).get(rank, step + 1),
                hyper=(hyper or {}).get(rank, ""),
                how=how,
            )
            self.add(rank, record)
        return self

    def optimizer(
        self,
        groups: Sequence[Sequence[int]] = ((0, 1, 2),),
        on: Mapping[int, Sequence[Sequence[int]]] | None = None,
    ) -> RunBuilder:
        for rank in self.ranks:
            chosen = (on or {}).get(rank, groups)
            self.add(rank, OptimizerRecord(0, "SGD", 0, [list(group) for group in chosen]))
        return self

    def hyper(self, step: int, on: Mapping[int, Mapping[str, Any]]) -> RunBuilder:
        for rank, changed in on.items():
            self.add(rank, HyperRecord(0, step, dict(changed)))
        return self

    def step(self, step: int, outliers: Outliers | None = None, **more: Any) -> RunBuilder:
        """One optimizer step of every rank."""
        return self.snapshot(Stage.PARAMS, step, outliers=outliers, **{"optimizer": 0, **more})

    def covered(
        self,
        compared: int = 3,
        steps: int = 5,
        ranks: Collection[int] | None = None,
        *,
        entry: int = 0,
        name: str = "SGD",
        seen: Sequence[str] = (),
        **not_compared: int,
    ) -> RunBuilder:
        """The parameters that an optimizer steps, on these ranks; those that are not compared by reason."""
        for rank in self.ranks if ranks is None else ranks:
            where = f"/home/me/train.py:{30 + entry}"
            self.add(rank, StepCoverageRecord(entry, name, where, steps, compared, not_compared))
            self.add(rank, TrainingRecord(0, list(seen)))
        return self

    def train(self, steps: int, first: int = 0, outliers: Outliers | None = None) -> RunBuilder:
        for step in range(first, first + steps):
            self.step(step, outliers)
        return self

    def rewrite(
        self, step: int, ranks: Collection[int], outliers: Outliers | None = None, how: str = ""
    ) -> RunBuilder:
        """Some ranks write to their parameters before a step. Ranks not in `outliers` all write the same values."""
        for rank in ranks:
            leaves = leaves_of(NAMES, step - 1, rank, (outliers or {}).get(rank, ()))
            root = hashlib.blake2b(b"".join(leaves), digest_size=16).hexdigest()
            self.add(
                rank,
                DigestRecord(
                    0,
                    Stage.REWRITTEN.value,
                    step,
                    root,
                    packed(leaves, 2),
                    2,
                    optimizer=0,
                    forward=step,
                    how=how,
                ),
            )
        return self

    def apply(
        self,
        step: int,
        outliers: Outliers | None = None,
        on: Mapping[int, Mapping[str, Any]] | None = None,
        ranks: Collection[int] | None = None,
        **fields: Any,
    ) -> RunBuilder:
        """Ranks are about to apply gradients. `fields`: fields of all records; `on`: other values on some ranks."""
        for rank in self.ranks if ranks is None else ranks:
            leaves = leaves_of(NAMES, step, rank, (outliers or {}).get(rank, ()))
            root = hashlib.blake2b(b"".join(leaves), digest_size=16).hexdigest()
            self.add(rank, AppliedRecord(step=step, root=root, **{**fields, **(on or {}).get(rank, {})}))
        return self

    def backward(
        self,
        number: int,
        local: Mapping[int, Sequence[float]],
        reduced: Sequence[float],
        reduced_on: Mapping[int, Sequence[float]] | None = None,
        **fields: Any,
    ) -> RunBuilder:
        """One reduced backward: `local` gradients by rank, one number per parameter, and the `reduced` gradients."""
        sizes = tuple(math.prod(row[2]) for row in self.rows(NAMES))
        for rank, own in local.items():
            result = (reduced_on or {}).get(rank, reduced)
            record = BackwardRecord(
                number=number,
                **{"step": number - 1, **fields},
                local=pack(map(sketch_of, own)),
                reduced=pack(sketch_of(result[index]) for index in distribute(sizes, self.world_size)[rank]),
                root=repr(list(result)),
            )
            self.add(rank, record)
        return self

    def detail(
        self,
        rank: int,
        step: int,
        outliers: Collection[str],
        first: Mapping[str, bytes],
        stage: str = "params",
        of: str = "parameters",
    ) -> RunBuilder:
        leaves = leaves_of(NAMES, step, rank, outliers)
        samples = b"".join(bytes((len(first.get(n, b"")),)) + first.get(n, b"") for n in NAMES)
        self.add(
            rank,
            DetailRecord(0, stage, step, of, 0, packed(leaves, 8), 8, base64.b64encode(samples).decode()),
        )
        return self

    def capture(
        self,
        rank: int,
        step: int,
        tensors: Mapping[str, Any],
        optimizer: int = 0,
        stage: str = "params",
        of: str = "parameters",
    ) -> RunBuilder:
        """Write real tensors to a file with the safetensors package."""
        from safetensors.torch import save_file

        name = f"captures/rank-{rank}-{step}-{optimizer}.safetensors"
        (self.folder / "captures").mkdir(parents=True, exist_ok=True)
        save_file(dict(tensors), self.folder / name)
        indices = [NAMES.index(tensor) for tensor in tensors]
        self.add(rank, CaptureRecord(0, stage, step, of, optimizer, name, indices))
        return self

    def end(self, ranks: Collection[int] | None = None, time: float = 2000.0, **fields: Any) -> RunBuilder:
        for rank in self.ranks if ranks is None else ranks:
            self.add(rank, EndRecord(**{"reason": "exit", "time": time, **fields}))
        return self

    def exited(
        self, rank: int, time: float, signal: int | None = None, found_gone: bool = False
    ) -> RunBuilder:
        """The launcher observed the exit of the process, with its signal where given, or noticed it late."""
        note = {"kind": "rank_exit", "rank": rank, "pid": 100 + rank, "host": "node0", "time": time}
        if found_gone:
            note["found_gone"] = True
        self.notes.append(note if signal is None else {**note, "signal": signal})
        return self

    def save(self) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "run.json").write_text(json.dumps(self.description))
        (self.folder / "node-node0.jsonl").write_text("".join(json.dumps(note) + "\n" for note in self.notes))
        for rank, records in self.records.items():
            self._path(rank).write_bytes(b"".join(map(to_line, records)))
        return self.folder

    def _path(self, rank: int) -> Path:
        """The first free name, and the same at each call. Another attempt has another builder."""
        if rank not in self._paths:
            taken = len(list(self.folder.glob(f"rank-{rank:05d}*.jsonl")))
            self._paths[rank] = self.folder / f"rank-{rank:05d}{f'.{taken}' if taken else ''}.jsonl"
        return self._paths[rank]

    def report(self) -> Report:
        return analyse_run(self.save())

    def findings(self, code: str = "") -> list[Finding]:
        return [finding for finding in self.report().findings if finding.code == code or not code]

    def only(self, code: str) -> Finding:
        """The only finding of the run that is not a note. It must have this code."""
        findings = [finding for finding in self.report().findings if finding.severity.value != "note"]
        assert [finding.code for finding in findings] == [code]
        return findings[0]


def leaves_of(names: Sequence[str], step: int, rank: int, outliers: Collection[str]) -> list[bytes]:
    """The digest of each tensor: equal on all ranks except for the tensors in `outliers` on this rank."""
    return [
        hashlib.blake2b(
            f"{name} {step} {rank if name in outliers else 'all'}".encode(), digest_size=16
        ).digest()
        for name in names
    ]


def sketch_of(number: float) -> Sketch:
    """A sketch with this value. NaN: the sketch of a gradient with a value that is not finite."""
    return Sketch(number, abs(number), int(number != number), 4)


def packed(leaves: Sequence[bytes], width: int) -> str:
    return base64.b64encode(b"".join(leaf[:width] for leaf in leaves)).decode()
