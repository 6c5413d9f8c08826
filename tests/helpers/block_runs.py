"""Writes the records of a run again, in blocks that begin and end anywhere."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from ddpcheck.records.blocks import BlockBuilder
from ddpcheck.records.reader import RecordFile
from ddpcheck.records.registry import RANK_FILES, Record, to_line


def in_blocks(source: Path, target: Path, most: int = 200, seed: int = 0) -> Path:
    """A copy of the run whose blocks have up to `most` records."""
    draw = random.Random(seed)
    shutil.copytree(source, target)
    for path in sorted(target.glob(RANK_FILES)):
        file = RecordFile(path)
        records: list[Record] = []
        while more := file.read():
            records += more
        torn = path.read_bytes().rpartition(b"\n")[2]
        path.write_bytes(block_file(records, most, draw) + torn)
    return target


def block_file(records: list[Record], most: int, draw: random.Random) -> bytes:
    """The records as a rank writes them."""
    parts: list[bytes] = []
    block = BlockBuilder()
    left = draw.randint((most + 1) // 2, most)
    for record in records:
        if not block.add(record):
            parts += [block.line()] if len(block) else []
            block = BlockBuilder()
            if not block.add(record):
                parts.append(to_line(record))
        left -= 1
        if left <= 0 and len(block):
            parts.append(block.line())
            block, left = BlockBuilder(), draw.randint((most + 1) // 2, most)
    return b"".join([*parts, block.line() if len(block) else b""])
