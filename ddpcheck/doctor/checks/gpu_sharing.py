"""Whether every rank has a GPU of its own."""

from __future__ import annotations

from ddpcheck.doctor.context import DoctorContext, Host
from ddpcheck.doctor.diagnosis import Diagnosis, Level
from ddpcheck.doctor.facts.record import Facts
from ddpcheck.doctor.visible import VARIABLE, visible_gpus
from ddpcheck.formatting import name_ranks

NAME = "GPUs of ranks"


def find(scene: DoctorContext) -> list[Diagnosis]:
    found = scene.by_rank(_variable)
    for host in scene.hosts if scene.is_job else ():
        found += _shared(host)
    return found


def _variable(facts: Facts) -> list[Diagnosis]:
    asked = facts.environment.get(VARIABLE)
    there = len(facts.gpus.get("gpus", ()))
    if asked is None or not there:
        return []
    seen = visible_gpus(facts)
    if seen.unknown:
        return [
            Diagnosis(
                NAME,
                Level.PROBLEM,
                f"{VARIABLE} is {asked}, and {seen.unknown} is none of the {there} GPUs.",
                f"CUDA leaves out that entry and all behind it: {len(seen.uuids)} of them can be used.",
                f"Name GPUs from 0 to {there - 1}, or by UUID.",
            )
        ]
    if not seen.uuids:
        return [
            Diagnosis(
                NAME,
                Level.WARNING,
                f"{VARIABLE} hides all {there} GPUs.",
                "The job runs on processors, or fails at the first `.cuda()`.",
                f"Unset {VARIABLE} unless that is wanted.",
            )
        ]
    return []


def _shared(host: Host) -> list[Diagnosis]:
    """Each rank is taken to use the GPU of its local rank, as nearly all scripts do."""
    users: dict[str, list[int]] = {}
    for facts in host.facts:
        seen = visible_gpus(facts).uuids
        if seen and facts.rank is not None:
            users.setdefault(seen[(facts.local_rank or 0) % len(seen)], []).append(facts.rank)
    if not users:
        return []
    shared = {gpu: ranks for gpu, ranks in users.items() if len(ranks) > 1}
    if not shared:
        return [Diagnosis(NAME, Level.OK, "each rank has one of its own", hosts=(host.name,))]
    told = "; ".join(f"{name_ranks(ranks)}: {gpu}" for gpu, ranks in list(shared.items())[:4])
    return [
        Diagnosis(
            NAME,
            Level.PROBLEM,
            f"Several ranks would use the same GPU ({told}).",
            "NCCL refuses two ranks of one group on a GPU; with gloo they share its memory and time.",
            f"Start no more ranks on a host than it has GPUs, and give each its own: {VARIABLE}, or "
            "`torch.cuda.set_device(LOCAL_RANK)`.",
            hosts=(host.name,),
            ranks=tuple(sorted(rank for ranks in shared.values() for rank in ranks)),
        )
    ]
