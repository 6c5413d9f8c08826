"""Whether all ranks came together, and on which hosts."""

from __future__ import annotations

from collections import Counter

from ddpcheck.doctor.context import DoctorContext
from ddpcheck.doctor.diagnosis import Diagnosis, Level
from ddpcheck.formatting import name_ranks

NAME = "ranks"


def find(scene: DoctorContext) -> list[Diagnosis]:
    if scene.world_size is None:
        return []
    if scene.apart:
        return [
            Diagnosis(
                NAME,
                Level.PROBLEM,
                f"This rank could not meet the others: {scene.apart}.",
                "A job's ranks meet in a store at MASTER_ADDR and MASTER_PORT before anything else; only this "
                "machine was looked at.",
                "Set both to a host and a free port that every host reaches, and the same on all of them.",
                hosts=tuple(host.name for host in scene.hosts),
                ranks=tuple(each.rank for each in scene.facts if each.rank is not None),
            )
        ]
    found = [_missing(scene)] if scene.missing else []
    found += _same_names(scene)
    return found or [_all_there(scene)]


def _missing(scene: DoctorContext) -> Diagnosis:
    return Diagnosis(
        NAME,
        Level.PROBLEM,
        f"{name_ranks(scene.missing).capitalize()} of {scene.world_size} did not report.",
        "The job would wait for them, too.",
        "Look at what their hosts printed: a host that is down, a Python without torch or ddpcheck, a firewall.",
        ranks=scene.missing,
    )


def _same_names(scene: DoctorContext) -> list[Diagnosis]:
    counts = Counter(host.first.host for host in scene.hosts)
    return [
        Diagnosis(
            NAME,
            Level.NOTE,
            f"{count} machines or containers have the same name, {name}.",
            "Reports and logs cannot tell them apart by name.",
            "Give each a host name of its own.",
            hosts=tuple(host.name for host in scene.hosts if host.first.host == name),
        )
        for name, count in counts.items()
        if count > 1
    ]


def _all_there(scene: DoctorContext) -> Diagnosis:
    hosts = len(scene.hosts)
    where = scene.hosts[0].name if hosts == 1 else f"{hosts} hosts"
    return Diagnosis(NAME, Level.OK, f"{scene.world_size} of {scene.world_size} reported, on {where}")
