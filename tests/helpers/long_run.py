"""Writes a run as its ranks and its launcher do, step by step, with parts that are small enough to be folded soon."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from ddpcheck.agent import record_parts
from ddpcheck.agent.writer import RecordWriter
from ddpcheck.analysis.report import Report
from ddpcheck.analysis.report_builder import build_report
from ddpcheck.analysis.run_reader import RunReader
from ddpcheck.launcher import folding
from ddpcheck.launcher.folding import Folding
from ddpcheck.records import folding as folded_files
from ddpcheck.records.kinds.rank import EndRecord, RankHeader
from ddpcheck.records.reader import RecordFile
from ddpcheck.records.registry import RANK_FILES, SCHEMA, Record
from ddpcheck.reports.json_report import to_json
from tests.scale.generate import STORED_SEED, make_run
from tests.scale.plan import Plan

PART_BYTES, SAMPLE_EVERY = 8_000, 32
NEVER = 1 << 40
_MOST_AT_ONCE = 1000


@contextmanager
def small_parts() -> Iterator[None]:
    with (
        mock.patch.object(record_parts, "PART_BYTES", PART_BYTES),
        mock.patch.object(record_parts, "SAMPLE_EVERY", SAMPLE_EVERY),
        mock.patch.object(folded_files, "SAMPLE_EVERY", SAMPLE_EVERY),
        mock.patch.object(folding, "TICK_SECONDS", 0.0),
        mock.patch.object(folding, "WORK_SECONDS", 60.0),
    ):
        yield


class LongRun:
    """Copies a run: `advance` writes the records of the next steps of all ranks, and `follow` reads them and folds."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        for path in source.iterdir():
            if not path.match(RANK_FILES):
                shutil.copy(path, folder)
        self._streams = [
            list(map(_as_written, RecordFile(path).all())) for path in sorted(source.glob(RANK_FILES))
        ]
        self._positions = [0] * len(self._streams)
        self.paths = [folder / f"rank-{rank:05d}.jsonl" for rank in range(len(self._streams))]
        self.writers = [RecordWriter(path, 0.05, bounded=True) for path in self.paths]
        self.run = RunReader(folder)
        self.folding = Folding(self.run)

    def advance(self, end: int) -> None:
        """Up to, but not including, this step."""
        while not self._advance(end):
            pass

    def _advance(self, end: int) -> bool:
        """Write as many records as may wait."""
        complete = True
        for rank, stream in enumerate(self._streams):
            for record in stream[self._positions[rank] :][:_MOST_AT_ONCE]:
                step = getattr(record, "step", None)
                if isinstance(record, EndRecord) or (type(step) is int and step >= end):
                    break
                self.writers[rank].write(record)
                self._positions[rank] += 1
            else:
                complete = False
            self.writers[rank].flush()
        return complete

    def follow(self) -> None:
        """As the launcher does at each tick."""
        self.run.poll()
        for session in self.run.attempts:
            self.folding.follow(session)
        self.folding.tick()

    def play(self, first: int, end: int, every: int = 100) -> None:
        for step in range(first, end + every, every):
            self.advance(min(step, end))
            self.follow()

    def close(self) -> None:
        for writer, stream in zip(self.writers, self._streams, strict=True):
            writer.close(stream[-1])

    def report(self) -> Report:
        """That of the launcher, which has followed the job."""
        return build_report(self.run, json.loads((self.folder / "run.json").read_text()))


def _as_written(record: Record) -> Record:
    """Of this version, with sketches as text."""
    if isinstance(record, RankHeader):
        return replace(record, schema=SCHEMA)
    texts = {
        name: base64.b85encode(value).decode() for name, value in vars(record).items() if type(value) is bytes
    }
    return replace(record, **texts) if texts else record  # type: ignore[arg-type]


def make_source(folder: Path, steps: int, outlier_step: int = NEVER, ranks: int = 3) -> Path:
    plan = Plan(ranks=ranks, steps=steps, outlier_rank=1, outlier_step=outlier_step, blocks=True)
    make_run(folder, STORED_SEED, plan)
    return folder


def essentials(report: Report) -> dict[str, Any]:
    """What must not depend on whether steps are folded. Statistics are of the steps that were kept."""
    raw = json.loads(to_json(report))
    kept = (
        "verdict",
        "world_size",
        "steps",
        "findings",
        "attempts",
        "checks",
        "coverage",
        "data",
        "not_judged",
    )
    stretches = [row["stretches"] for row in raw["agreement"]]
    cost = {name: raw["cost"][name] for name in ("cost_us", "share", "by_probe")} if raw["cost"] else None
    memory = [row["peak"] for row in raw["memory"]["ranks"]] if raw["memory"] else None
    return {
        **{name: raw[name] for name in kept},
        "stretches": stretches,
        "cost": cost,
        "memory": memory,
        "unreadable_lines": raw["run"]["unreadable_lines"],
    }
