"""The lines of the nodes' logs, from whatever is there of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def node_lines(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Each with the name of its file; one that cannot be read has none."""
    for path in sorted(folder.glob("node-*.jsonl")):
        try:
            with path.open("rb") as file:
                for line in file:
                    yield path.name, line
        except OSError:
            continue
