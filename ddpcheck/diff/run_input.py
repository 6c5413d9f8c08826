"""One of two runs: which attempt is meant, and its ranks' records from beginning to end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ddpcheck.analysis.run_reader import by_start, read_description
from ddpcheck.errors import NotComparable
from ddpcheck.records.reader import RecordFile
from ddpcheck.records.schema import RANK_FILES, RankHeader, Record


@dataclass(frozen=True)
class Side:
    """One start of a job; `files` and `headers` by rank."""

    label: str
    folder: Path
    attempt: int
    description: dict[str, Any]
    files: dict[int, Path] = field(default_factory=dict)
    headers: dict[int, RankHeader] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        return max(header.world_size for header in self.headers.values())

    @property
    def first_rank(self) -> int:
        """The rank that speaks for the run: 0, unless its file is gone."""
        return min(self.headers)

    def header(self) -> RankHeader:
        return self.headers[self.first_rank]

    def records(self, rank: int) -> Iterator[Record]:
        """A chunk of the file in memory at a time."""
        file = RecordFile(self.files[rank])
        while records := file.read():
            yield from records

    def setting(self, name: str, default: Any) -> Any:
        """An option of `ddpcheck run`, as that run was made with."""
        config = self.description.get("config")
        return config.get(name, default) if isinstance(config, dict) else default

    @property
    def recorded_by(self) -> str:
        return str(self.description.get("ddpcheck", ""))


def read_side(label: str, folder: Path, attempt: int | None) -> Side:
    """The attempt that was asked for; without one the last, which is what reports are about as well."""
    description = read_description(folder)
    attempts = _attempts(folder)
    if not attempts:
        raise NotComparable(
            f"no rank reported in {folder}: there is nothing to compare. A job on one rank is watched as well, if it "
            "makes a process group and wraps its model in DDP (torchrun --nproc-per-node 1)"
        )
    number = len(attempts) - 1 if attempt is None else attempt
    if number >= len(attempts):
        known = "only attempt 0" if len(attempts) == 1 else f"attempts 0 to {len(attempts) - 1}"
        raise NotComparable(f"{folder} has no attempt {number}: it holds {known}")
    headers = {rank: header for rank, (_, header) in sorted(attempts[number].items())}
    files = {rank: path for rank, (path, _) in attempts[number].items()}
    return Side(label, folder, number, description, files, headers)


def _attempts(folder: Path) -> list[dict[int, tuple[Path, RankHeader]]]:
    """Files by start of the job, the oldest first; told apart as a report tells them."""
    found: dict[str, dict[int, tuple[Path, RankHeader]]] = {}
    for path in sorted(folder.glob(RANK_FILES), key=by_start):
        header = _header(path)
        if header is None:
            continue
        while header.rank in found.setdefault(header.session, {}):
            header = replace(header, session=f"+{header.session}")
        found[header.session][header.rank] = (path, header)
    return sorted(found.values(), key=lambda files: min(header.time for _, header in files.values()))


def _header(path: Path) -> RankHeader | None:
    first = RecordFile(path).read(most=1)
    return first[0] if first and isinstance(first[0], RankHeader) else None
