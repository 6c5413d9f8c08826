"""How far each process group of this rank is: collectives enqueued and completed, from torch's own counters.

Called from the thread that answers the launcher, never from the training thread. Nothing is enabled here: the flight
recorder records NCCL by default, and gloo by default in recent versions of torch, in others where the job sets
`TORCH_FR_BUFFER_SIZE`. Without it only the number of enqueued collectives is known.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from ddpcheck import torch_compat
from ddpcheck.records.kinds.rank import GroupProgress

# The last collectives of each group that are kept: enough to find the first one in which ranks differ.
MAX_RECENT = 16
# A tensor list of a coalesced collective may be very long.
MAX_SIZES = 8


def collectives_issued() -> dict[str, int]:
    """By process group, if torch and the backend count them."""
    counts: dict[str, int] = {}
    for group, name in _groups().items():
        count = torch_compat.read(torch_compat.SEQUENCE_NUMBER, group)
        try:
            if count is not None:
                counts[name] = int(count())
        except RuntimeError:  # a backend that does not count
            continue
    return counts


def progress_mark() -> tuple[Any, ...]:
    """Changes whenever a collective completes; where completions are not known, whenever one is enqueued.

    Without entries, the flight recorder queries no event of a device, which would break a graph that is captured.
    """
    completed = [row for dump in _recorders() for row in _completed(dump(False, False))]
    issued = collectives_issued()
    # The recorder numbers groups in its own way: if it lacks one, which one is not known.
    return (*completed, *(sorted(issued.items()) if len(issued) > len(completed) else ()))


def _completed(trace: bytes | str) -> list[tuple[str, int]]:
    """The last completed collective of each group; the rest of a dump may change without progress."""
    try:
        document = json.loads(trace)
    except ValueError:
        return []
    status = document.get("pg_status") if isinstance(document, dict) else None
    numbers = {
        str(key): _number(each, "last_completed_collective")
        for key, each in (status.items() if isinstance(status, dict) else ())
    }
    return sorted((key, number) for key, number in numbers.items() if number is not None)


def group_progress() -> dict[str, GroupProgress]:
    """By name of the process group."""
    groups = {name: GroupProgress(enqueued=count) for name, count in collectives_issued().items()}
    for dump in _recorders():
        groups.update(parse_trace(dump(True, False)))
    members = _members()
    for name, progress in groups.items():
        progress.ranks.extend(members.get(name, ()))
    return groups


def parse_trace(trace: bytes | str) -> dict[str, GroupProgress]:
    """The groups in a dump of the flight recorder (JSON, version 2.x). Entries that cannot be read are left out."""
    try:
        document = json.loads(trace)
    except ValueError:
        return {}
    if not isinstance(document, dict):
        return {}
    groups: dict[str, GroupProgress] = {}
    names: dict[str, str] = {}
    finished: dict[str, dict[int, bool]] = {}
    for entry in document.get("entries") or ():
        match entry:
            case {"process_group": [str(name), *_], "collective_seq_id": int(number), "is_p2p": False}:
                names[str(entry.get("pg_id"))] = name
                progress = groups.setdefault(name, GroupProgress())
                progress.enqueued = max(progress.enqueued, number)
                finished.setdefault(name, {})[number] = (
                    entry.get("retired") is True or entry.get("state") == "completed"
                )
                progress.recent.append(
                    [number, _operation(entry), _sizes(entry), str(entry.get("state", ""))]
                )
                del progress.recent[:-MAX_RECENT]
    for key, status in (document.get("pg_status") or {}).items():
        name = names.get(key, "")
        progress = groups.get(name) or GroupProgress()
        progress.enqueued = max(progress.enqueued, _number(status, "last_enqueued_collective") or 0)
        completed = _number(status, "last_completed_collective")
        # -1: no collective has completed yet.
        progress.completed = max(completed, 0) if completed is not None else None
        if progress.completed is not None and progress.enqueued in finished.get(name, {}):
            progress.completed = _last_without_gap(finished[name], progress.completed)
    return groups


def _last_without_gap(finished: Mapping[int, bool], last_in_time: int) -> int:
    """The last collective before the first unfinished one.

    `last_completed_collective` is the one that completed last in time: gloo completes collectives on several threads,
    so that it may stay below the last number for good although nothing is pending. If even the oldest entry that the
    recorder keeps is unfinished, older ones that it dropped may be too.
    """
    unfinished = [number for number, done in finished.items() if not done]
    if not unfinished:
        return max(finished)
    first = min(unfinished)
    return min(first - 1, last_in_time) if first == min(finished) else first - 1


def _operation(entry: Mapping[str, Any]) -> str:
    """`all_reduce` of `nccl:all_reduce`."""
    return str(entry.get("profiling_name", "")).rpartition(":")[2]


def _sizes(entry: Mapping[str, Any]) -> list[Any]:
    sizes = entry.get("input_sizes")
    return sizes[:MAX_SIZES] if isinstance(sizes, list) else []


def _number(status: Any, name: str) -> int | None:
    try:
        return int(status[name])
    except (KeyError, TypeError, ValueError):
        return None


def _recorders() -> list[Callable[[bool, bool], bytes]]:
    dumps = (
        torch_compat.lookup(name)
        for name in (torch_compat.FLIGHT_RECORDER, torch_compat.NCCL_FLIGHT_RECORDER)
    )
    return [dump for dump in dumps if dump is not None]


def _groups() -> dict[Any, str]:
    names = getattr(torch_compat.lookup(torch_compat.WORLD), "pg_names", None)
    return {group: str(name) for group, name in list(names.items())} if isinstance(names, dict) else {}


def _members() -> dict[str, list[int]]:
    """The ranks of each process group."""
    ranks = getattr(torch_compat.lookup(torch_compat.WORLD), "pg_group_ranks", None)
    if not isinstance(ranks, dict):
        return {}
    return {name: sorted(ranks[group]) for group, name in _groups().items() if group in ranks}
