"""Ranks of a job: which reported, and what differs between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from ddpcheck.analysis.aggregate.agreement import groups_of, outlier_ranks
from ddpcheck.analysis.coverage import PER_RANK
from ddpcheck.analysis.finding import Severity
from ddpcheck.doctor.facts.record import Facts
from ddpcheck.doctor.model import Diagnosis, DoctorContext, check, diagnosis, note, ok, problem
from ddpcheck.formatting import name_ranks

_MAX_LISTED = 4
_DIFFERENT_KERNELS = "Kernels and DDP may differ between versions and give different bits (DDP604)."
_SAME_IMAGE = "Start all ranks from the same environment or container image."
_Read = Callable[[Facts], str]

_SOFTWARE: tuple[tuple[str, _Read, str], ...] = (
    ("torch", lambda facts: str(facts.torch.get("version") or ""), _DIFFERENT_KERNELS),
    ("CUDA of torch", lambda facts: str(facts.torch.get("cuda") or ""), _DIFFERENT_KERNELS),
    (
        "NCCL",
        lambda facts: str(facts.torch.get("nccl") or ""),
        "Ranks with different versions of NCCL may fail to connect, or hang.",
    ),
    ("GPU driver", lambda facts: str(facts.gpus.get("driver") or ""), _DIFFERENT_KERNELS),
    (
        "GPU",
        lambda facts: ", ".join(sorted({str(gpu.get("name")) for gpu in facts.gpus.get("gpus", ())})),
        "All ranks wait for the slowest one, and different GPUs give different bits.",
    ),
    (
        "Python",
        lambda facts: str(facts.python.get("version") or ""),
        "Other packages probably differ as well (DDP604).",
    ),
)

# Variables that differ between ranks by design.
_PER_RANK_VARIABLES = PER_RANK | {
    "NODE_RANK",
    "LOCAL_WORLD_SIZE",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "PMI_RANK",
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "NCCL_DEBUG_FILE",
}
# Names of interfaces and cards may legitimately differ between hosts.
_PER_HOST_VARIABLES = frozenset({"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_DEBUG"})


@check("ranks", order=10)
def ranks(context: DoctorContext) -> list[Diagnosis]:
    if context.world_size is None:
        return []
    if context.rendezvous_error:
        return [
            problem(
                f"This rank could not reach the others: {context.rendezvous_error}.",
                "Ranks first connect to a store at MASTER_ADDR and MASTER_PORT. Only this machine was checked.",
                "Set both to a host and a free port that every host can reach, with the same values on all hosts.",
                hosts=tuple(host.name for host in context.hosts),
                ranks=tuple(each.rank for each in context.facts if each.rank is not None),
            )
        ]
    diagnoses = [_missing_ranks(context)] if context.missing else []
    diagnoses += _duplicate_host_names(context)
    return diagnoses or [_all_reported(context)]


def _missing_ranks(context: DoctorContext) -> Diagnosis:
    return problem(
        f"{name_ranks(context.missing).capitalize()} of {context.world_size} did not report.",
        "The job would wait for them as well.",
        "Check the output of their hosts. Common causes: host down, Python without torch or ddpcheck, firewall.",
        ranks=context.missing,
    )


def _duplicate_host_names(context: DoctorContext) -> list[Diagnosis]:
    counts = Counter(host.first.host for host in context.hosts)
    return [
        note(
            f"{count} machines or containers have the same name, {name}.",
            "Reports and logs cannot distinguish them by name.",
            "Give each a unique host name.",
            hosts=tuple(host.name for host in context.hosts if host.first.host == name),
        )
        for name, count in counts.items()
        if count > 1
    ]


def _all_reported(context: DoctorContext) -> Diagnosis:
    hosts = len(context.hosts)
    where = context.hosts[0].name if hosts == 1 else f"{hosts} hosts"
    return ok(f"{context.world_size} of {context.world_size} reported, on {where}")


@check("differences", order=170)
def differences(context: DoctorContext) -> list[Diagnosis]:
    ranks = {each.rank: each for each in context.facts if each.rank is not None}
    if len(ranks) < 2:
        return []
    diagnoses = [
        different
        for what, read, cause in _SOFTWARE
        if (different := _differing(ranks, what, read, Severity.WARNING, cause, _SAME_IMAGE)) is not None
    ]
    diagnoses += _differing_variables(ranks)
    return diagnoses or [ok(f"none between {len(ranks)} ranks in software or variables")]


def _differing_variables(ranks: Mapping[int, Facts]) -> list[Diagnosis]:
    names = sorted({name for facts in ranks.values() for name in facts.environment} - _PER_RANK_VARIABLES)
    diagnoses = []
    for name in names:
        may_differ = name in _PER_HOST_VARIABLES
        different = _differing(
            ranks,
            name,
            lambda facts, name=name: facts.environment.get(name, "not set"),  # type: ignore[misc]
            Severity.NOTE if may_differ else Severity.WARNING,
            "This is correct only if interfaces or cards have different names on the hosts."
            if may_differ
            else "Ranks with different settings may compute, communicate or fail differently.",
            "Set it to the same value for all ranks, in the launcher's environment.",
        )
        if different is not None:
            diagnoses.append(different)
    return diagnoses


def _differing(
    ranks: Mapping[int, Facts], what: str, read: _Read, severity: Severity, cause: str, fix: str
) -> Diagnosis | None:
    groups = groups_of({rank: read(facts) for rank, facts in ranks.items()})
    if len(groups) < 2:
        return None
    listed = "; ".join(f"{name_ranks(some)}: {value or 'none'}" for value, some in groups[:_MAX_LISTED])
    more = f"; {len(groups) - _MAX_LISTED} more values" if len(groups) > _MAX_LISTED else ""
    return diagnosis(
        severity,
        f"{what} differs: {listed}{more}.",
        cause,
        fix,
        ranks=outlier_ranks([some for _, some in groups]),
        evidence={"what": what, "values": {name_ranks(some): value for value, some in groups}},
    )
