"""What differs between ranks that should be the same, as DDP604 tells it of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ddpcheck.analysis.aggregate.agreement import groups_of, outlier_ranks
from ddpcheck.analysis.environment import PER_RANK
from ddpcheck.doctor.context import DoctorContext
from ddpcheck.doctor.diagnosis import Diagnosis, Level
from ddpcheck.doctor.facts.record import Facts
from ddpcheck.formatting import name_ranks

NAME = "differences"
_MOST_TOLD = 4
_KERNELS = "Kernels and DDP itself may differ between versions, and so may the bits they give (DDP604)."
_IMAGE = "Start all ranks from the same environment or container image."
_Read = Callable[[Facts], str]

_SOFTWARE: tuple[tuple[str, _Read, str], ...] = (
    ("torch", lambda facts: str(facts.torch.get("version") or ""), _KERNELS),
    ("CUDA of torch", lambda facts: str(facts.torch.get("cuda") or ""), _KERNELS),
    (
        "NCCL",
        lambda facts: str(facts.torch.get("nccl") or ""),
        "Ranks of different versions of NCCL may fail to connect, or hang.",
    ),
    ("GPU driver", lambda facts: str(facts.gpus.get("driver") or ""), _KERNELS),
    (
        "GPU",
        lambda facts: ", ".join(sorted({str(gpu.get("name")) for gpu in facts.gpus.get("gpus", ())})),
        "All ranks wait for the slowest, and different GPUs give different bits.",
    ),
    (
        "Python",
        lambda facts: str(facts.python.get("version") or ""),
        "Other packages most likely differ as well (DDP604).",
    ),
)

# Different by their nature, beside those that launchers give to each rank.
_OF_EACH = PER_RANK | {
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
# Names of interfaces and cards differ between hosts in good order.
_MAY_DIFFER = frozenset({"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_DEBUG"})


def find(scene: DoctorContext) -> list[Diagnosis]:
    ranks = {each.rank: each for each in scene.facts if each.rank is not None}
    if len(ranks) < 2:
        return []
    found = [
        told
        for what, read, why in _SOFTWARE
        if (told := _unlike(ranks, what, read, Level.WARNING, why, _IMAGE)) is not None
    ]
    found += _variables(ranks)
    return found or [Diagnosis(NAME, Level.OK, f"none between {len(ranks)} ranks in software or variables")]


def _variables(ranks: Mapping[int, Facts]) -> list[Diagnosis]:
    names = sorted({name for facts in ranks.values() for name in facts.environment} - _OF_EACH)
    found = []
    for name in names:
        may = name in _MAY_DIFFER
        told = _unlike(
            ranks,
            name,
            lambda facts, name=name: facts.environment.get(name, "not set"),  # type: ignore[misc]
            Level.NOTE if may else Level.WARNING,
            "Right where the hosts' interfaces and cards have different names, wrong elsewhere."
            if may
            else "Ranks that are set up differently compute, communicate or fail differently.",
            "Set it to the same value for all ranks, in the launcher's environment.",
        )
        if told is not None:
            found.append(told)
    return found


def _unlike(
    ranks: Mapping[int, Facts], what: str, read: _Read, level: Level, why: str, fix: str
) -> Diagnosis | None:
    groups = groups_of({rank: read(facts) for rank, facts in ranks.items()})
    if len(groups) < 2:
        return None
    told = "; ".join(f"{name_ranks(some)}: {value or 'none'}" for value, some in groups[:_MOST_TOLD])
    more = f"; {len(groups) - _MOST_TOLD} more values" if len(groups) > _MOST_TOLD else ""
    return Diagnosis(
        NAME,
        level,
        f"{what} differs: {told}{more}.",
        why,
        fix,
        ranks=outlier_ranks([some for _, some in groups]),
        evidence={"what": what, "values": {name_ranks(some): value for value, some in groups}},
    )
