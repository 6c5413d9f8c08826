"""Damage: reproducible from its seed, and readable files stay of their kind where only values change."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

from ddpcheck.records.blocks import MARK
from ddpcheck.records.kinds.digests import DigestRecord
from ddpcheck.records.reader import RecordFile
from tests.chaos import mutations
from tests.chaos.mutations import mutate, mutate_folder
from tests.helpers.run_builder import RunBuilder

LINES = b"".join(
    json.dumps({"kind": "x", "step": step, "names": ["a", "b"]}).encode() + b"\n" for step in range(9)
)


def test_the_same_seed_gives_the_same_damage(tmp_path: Path) -> None:
    contents = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-00000.jsonl").write_bytes(LINES)
        (tmp_path / name / "run.json").write_text("{}")
        how = mutate_folder(random.Random(7), tmp_path / name, [LINES], tmp_path / "outside")
        contents.append((how, [path.read_bytes() for path in sorted((tmp_path / name).iterdir())]))
    assert contents[0] == contents[1]


def test_changed_values_leave_the_other_lines_as_they_are() -> None:
    values = LINES.splitlines()
    total = 0
    for number in range(50):
        damaged = mutations._values(random.Random(number), LINES, [LINES]).splitlines()
        changed = [json.loads(a) != json.loads(b) for a, b in zip(damaged, values, strict=True)]
        assert sum(changed) <= 2
        total += sum(changed)
    assert total > 25


def test_compressed_files_stay_readable() -> None:
    packed = gzip.compress(LINES)
    kept = 0
    for number in range(40):
        _, damaged = mutate(random.Random(number), packed, [LINES])
        try:
            gzip.decompress(damaged)
            kept += 1
        except (OSError, EOFError, gzip.zlib.error):  # type: ignore[attr-defined]
            continue
    assert kept > 20


def test_damage_in_a_block_has_a_checksum_that_fits(tmp_path: Path) -> None:
    """Otherwise no reader would look at it."""
    builder = RunBuilder(tmp_path, 1)
    path = builder.wrap().optimizer().train(20).end().save() / "rank-00000.jsonl"
    data = path.read_bytes()
    if b"\n" + MARK not in data:
        data = data + _block()
    damaged, records = 0, 0
    for number in range(60):
        path.write_bytes(mutations._blocks(random.Random(number), data, [LINES]))
        file = RecordFile(path)
        while read := file.read():
            records += sum(isinstance(record, DigestRecord) for record in read)
        damaged += bool(file.bad)
    # Some damage is refused by the reader, and some is read as other values.
    assert 0 < damaged < 60
    assert records


def _block() -> bytes:
    from ddpcheck.records.blocks import BlockBuilder

    builder = BlockBuilder()
    for step in range(20):
        assert builder.add(DigestRecord(0, "params", step, "aa" * 16, "", 2, time=float(step), optimizer=0))
    return builder.line()
