"""Shared memory: data-loader workers hand their batches over in it, and NCCL its buffers."""

from __future__ import annotations

from ddpcheck.doctor.context import DoctorContext
from ddpcheck.doctor.diagnosis import Diagnosis, Level
from ddpcheck.doctor.facts.record import Facts
from ddpcheck.formatting import size_text

NAME = "shared memory"
_LITTLE = 256 << 20
_SCANT = 1 << 30
_WHY = "Data-loader workers hand batches over in /dev/shm, NCCL its buffers; where it is full they die by SIGBUS."
_FIX = "Start the container with more (`--shm-size=8g` or `--ipc=host`), or clear out what others left in /dev/shm."


def find(scene: DoctorContext) -> list[Diagnosis]:
    return scene.by_host(_look)


def _look(facts: Facts) -> list[Diagnosis]:
    shared = facts.memory.get("shared") or {}
    if not shared:
        return []
    if shared.get("error") or not shared.get("writable", True):
        reason = shared.get("error") or "it cannot be written"
        return [Diagnosis(NAME, Level.WARNING, f"/dev/shm cannot be used: {reason}.", _WHY, _FIX)]
    total, free = shared["total"], shared["free"]
    told = f"{size_text(free)} of {size_text(total)} free in /dev/shm"
    if free >= _SCANT:
        return [Diagnosis(NAME, Level.OK, told)]
    level = Level.WARNING if free < _LITTLE else Level.NOTE
    return [Diagnosis(NAME, level, f"Only {told}.", _WHY, _FIX)]
