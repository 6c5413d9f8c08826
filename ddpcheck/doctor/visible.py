"""Which GPUs a process would see, by CUDA_VISIBLE_DEVICES and the GPUs that are there."""

from __future__ import annotations

from dataclasses import dataclass

from ddpcheck.doctor.facts.record import Facts

VARIABLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Visible:
    """UUIDs in CUDA's order, and the first word of the variable that means no GPU: CUDA stops there."""

    uuids: tuple[str, ...]
    unknown: str = ""


def visible_gpus(facts: Facts) -> Visible:
    """Where the GPUs are not all alike CUDA may count them in another order than NVML."""
    gpus = facts.gpus.get("gpus", ())
    everyone = [str(gpu.get("uuid") or gpu.get("index")) for gpu in gpus]
    asked = facts.environment.get(VARIABLE)
    if asked is None:
        return Visible(tuple(everyone))
    slices = [str(one["uuid"]) for gpu in gpus for one in gpu.get("mig", ()) if one.get("uuid")]
    found: list[str] = []
    for word in filter(None, (part.strip() for part in asked.split(","))):
        meant = _meant(word, everyone, slices)
        if not meant:
            return Visible(tuple(found), "" if word == "-1" else word)
        found.append(meant)
    return Visible(tuple(found))


def _meant(word: str, uuids: list[str], slices: list[str]) -> str:
    if word.isdecimal():
        return uuids[int(word)] if int(word) < len(uuids) else ""
    # The beginning of a UUID is enough, if it is that of one only.
    fitting = [one for one in (*uuids, *slices) if one.startswith(word)]
    return fitting[0] if len(fitting) == 1 else ""
