"""What the control group of this process may use, in either version of cgroups."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
# The first version has no word for "no limit" but a number near the largest there is.
_NO_LIMIT = 1 << 60


def memory_limit(root: Path = _ROOT, own: Path = _OWN) -> int | None:
    """Bytes: the tightest limit on the way up."""
    found = [
        int(text)
        for folder in _folders("memory", root, own)
        for name in ("memory.max", "memory.limit_in_bytes")
        if (text := _text(folder / name)).isdecimal()
    ]
    least = min(found, default=None)
    return None if least is None or least >= _NO_LIMIT else least


def processor_limit(root: Path = _ROOT, own: Path = _OWN) -> float | None:
    """In whole processors' time: 1.5 is one and a half."""
    shares = [_share(folder) for folder in _folders("cpu", root, own)]
    least = min(shares, default=math.inf)
    return None if math.isinf(least) else round(least, 3)


def _share(folder: Path) -> float:
    words = _text(folder / "cpu.max").split()
    if not words:
        words = [_text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")]
    if len(words) != 2 or not all(word.isdecimal() for word in words) or not int(words[1]):
        return math.inf  # "max", or -1
    return int(words[0]) / int(words[1])


def _folders(controller: str, root: Path, own: Path) -> Iterator[Path]:
    """From the group of this process up to the root, for the second version and the first."""
    for line in _text(own).splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers and controller not in controllers.split(","):
            continue
        top = root / controllers if controllers else root
        # Where a container shows only its own part of the tree, the path leads nowhere and the top remains.
        inside = Path(path.lstrip("/"))
        yield from (top / each for each in (inside, *inside.parents))


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
