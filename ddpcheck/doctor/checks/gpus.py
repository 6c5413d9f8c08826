"""The GPUs of a host: lost, held back, in use by others, unlike each other, or unevenly connected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from ddpcheck.analysis.hardware.statistics import THROTTLING
from ddpcheck.doctor.context import DoctorContext
from ddpcheck.doctor.diagnosis import Diagnosis, Level
from ddpcheck.doctor.facts.record import Facts
from ddpcheck.formatting import size_text

NAME = "GPUs"
# An idle driver holds some memory, and so does a display.
_IN_USE = 2 << 30
# A GPU that nobody uses may be held to any power; heat and the hardware's own brake tell something.
_HARMLESS = 0x4


def find(scene: DoctorContext) -> list[Diagnosis]:
    return scene.by_host(_look)


def _look(facts: Facts) -> list[Diagnosis]:
    gpus = facts.gpus.get("gpus", ())
    if not gpus:
        return _none(str(facts.gpus.get("note") or facts.gpus.get("error") or "no GPU"))
    found = [
        *_unreached(facts),
        *_lost(facts),
        *_held_back(facts),
        *_busy(facts),
        *_unlike(gpus),
        *_links(gpus),
    ]
    found += [*_no_peers(facts), *_narrow(facts)]
    return found or [Diagnosis(NAME, Level.OK, _line(facts))]


def _none(note: str) -> list[Diagnosis]:
    if "does not answer" not in note and "not installed" not in note:
        return [Diagnosis(NAME, Level.OK, note)]
    return [
        Diagnosis(
            NAME,
            Level.WARNING,
            f"There is a driver, but GPUs cannot be asked: {note}.",
            "Nothing is known of them, and a job may not see them either.",
            "Try `nvidia-smi`; a driver that was updated without a restart answers like this.",
        )
    ]


def _unreached(facts: Facts) -> Iterator[Diagnosis]:
    note = str(facts.gpus.get("note") or "")
    if "cannot be reached" in note:
        yield Diagnosis(
            NAME,
            Level.PROBLEM,
            f"{note}.",
            "A rank that is given this GPU fails.",
            "Look at `dmesg` for its last words (Xid), and restart the machine or leave the GPU out.",
        )


def _lost(facts: Facts) -> Iterator[Diagnosis]:
    lost = [str(gpu["index"]) for gpu, now in _at_this_moment(facts) if now.get("lost")]
    if lost:
        yield Diagnosis(
            NAME,
            Level.PROBLEM,
            f"GPU {', '.join(lost)} is lost: the driver cannot talk to it any more.",
            "A rank that is given this GPU fails.",
            "Look at `dmesg` for its last words (Xid), and restart the machine or leave the GPU out.",
        )


def _held_back(facts: Facts) -> Iterator[Diagnosis]:
    for gpu, now in _at_this_moment(facts):
        bits = int(now.get("throttled") or 0) & ~_HARMLESS
        reasons = [name for bit, name in THROTTLING.items() if bits & bit]
        if reasons:
            yield Diagnosis(
                NAME,
                Level.WARNING,
                f"GPU {gpu['index']} is held back: {', '.join(reasons)}.",
                "All ranks wait for the slowest one at every step.",
                "Look at its cooling and power supply (`nvidia-smi -q -d PERFORMANCE`).",
            )


def _busy(facts: Facts) -> Iterator[Diagnosis]:
    for gpu, now in _at_this_moment(facts):
        processes = now.get("processes") or {}
        used = int(now.get("memory") or 0)
        if processes and used >= _IN_USE:
            pids = ", ".join(list(processes)[:4])
            yield Diagnosis(
                NAME,
                Level.WARNING,
                f"GPU {gpu['index']} is in use: {size_text(used)} of its memory, by process {pids}.",
                "The job has less memory there, and shares the GPU's time.",
                "End those processes if they are left over, or leave the GPU out with CUDA_VISIBLE_DEVICES.",
            )


def _unlike(gpus: list[Any]) -> Iterator[Diagnosis]:
    kinds = Counter(f"{gpu.get('name')}, {size_text(gpu.get('memory') or 0)}" for gpu in gpus)
    if len(kinds) > 1:
        told = "; ".join(f"{count} x {kind}" for kind, count in kinds.most_common(4))
        yield Diagnosis(
            NAME,
            Level.WARNING,
            f"The GPUs of this host are not alike: {told}.",
            "All ranks wait for the slowest one, and the smallest memory limits the batch.",
            "Use GPUs of one kind for a job (CUDA_VISIBLE_DEVICES).",
        )


def _links(gpus: list[Any]) -> Iterator[Diagnosis]:
    counts = [len(gpu.get("nvlinks") or ()) for gpu in gpus]
    if len(set(counts)) > 1:
        few = [str(gpu["index"]) for gpu, count in zip(gpus, counts, strict=True) if count < max(counts)]
        yield Diagnosis(
            NAME,
            Level.WARNING,
            f"GPU {', '.join(few)} has fewer active NVLinks than the others ({max(counts)}).",
            "A link that is down slows every AllReduce on this host.",
            "Look at `nvidia-smi nvlink --status`.",
        )


def _no_peers(facts: Facts) -> Iterator[Diagnosis]:
    peers = facts.gpus.get("p2p") or ()
    pairs = [(a, b) for a, row in enumerate(peers) for b, reads in enumerate(row) if a < b and not reads]
    if pairs:
        told = ", ".join(f"{a}-{b}" for a, b in pairs[:6]) + (" and more" if len(pairs) > 6 else "")
        yield Diagnosis(
            NAME,
            Level.NOTE,
            f"GPUs {told} cannot read each other's memory.",
            "NCCL goes through the host's memory between them, which is slower.",
            "On bare metal look at IOMMU and ACS settings; between sockets it may be as it must be.",
        )


def _narrow(facts: Facts) -> Iterator[Diagnosis]:
    """Generations sink when a link is idle and say nothing; widths do not."""
    narrow = []
    for gpu, now in _at_this_moment(facts):
        most, link = (gpu.get("pcie") or [None, None])[1], (now.get("pcie_link") or [None, None])[1]
        if most and link and link < most:
            narrow.append(f"{gpu['index']} ({link} of {most} lanes)")
    if narrow:
        yield Diagnosis(
            NAME,
            Level.NOTE,
            f"GPU {', '.join(narrow)} uses fewer PCIe lanes than it could.",
            "Copies between host and GPU have that much less bandwidth.",
            "Look whether the slot has all its lanes, and whether the card is seated well.",
        )


def _at_this_moment(facts: Facts) -> list[tuple[Any, Any]]:
    return list(zip(facts.gpus.get("gpus", ()), facts.gpus.get("now", ()), strict=False))


def _line(facts: Facts) -> str:
    gpus = facts.gpus["gpus"]
    links = Counter(
        kind for a, row in enumerate(facts.gpus.get("topology", ())) for kind in row[a + 1 :] if kind != "X"
    )
    connected = ", ".join(kind for kind, _ in links.most_common(3))
    told = f"{len(gpus)} x {gpus[0].get('name')}, driver {facts.gpus.get('driver')}"
    return f"{told}, connected by {connected}" if connected else told
