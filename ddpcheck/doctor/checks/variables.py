"""Variables that change how fast a job is, what it computes, or whether it fails."""

from __future__ import annotations

from dataclasses import dataclass

from ddpcheck.doctor.context import DoctorContext
from ddpcheck.doctor.diagnosis import Diagnosis, Level
from ddpcheck.doctor.facts.record import Facts

NAME = "variables"
_OFF = frozenset({"", "0", "false", "off", "no", "n", "f"})
_UNLESS = "Unset it unless you are looking for a fault with it."
_CHOSEN = "Unset it unless you have measured that it helps."


@dataclass(frozen=True)
class _Variable:
    """Told where the value is one of `values`, or anything that means "on" where none are given."""

    names: str
    level: Level
    why: str
    fix: str = _UNLESS
    values: frozenset[str] = frozenset()
    # Set at all, whatever the value.
    any_value: bool = False
    # Of no effect without a GPU, and then only a note.
    on_gpu: bool = True


_KNOWN = (
    _Variable(
        "CUDA_LAUNCH_BLOCKING",
        Level.WARNING,
        "Python waits for every kernel: nothing overlaps, neither communication nor data loading.",
    ),
    _Variable(
        "NCCL_P2P_DISABLE",
        Level.WARNING,
        "GPUs of one host do not read each other's memory, and NVLink is not used.",
    ),
    _Variable("NCCL_SHM_DISABLE", Level.WARNING, "Ranks of one host may talk through the network instead."),
    _Variable(
        "TORCH_NCCL_BLOCKING_WAIT NCCL_BLOCKING_WAIT",
        Level.WARNING,
        "Python waits for every collective, so that nothing overlaps with it.",
    ),
    _Variable(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING NCCL_ASYNC_ERROR_HANDLING",
        Level.WARNING,
        "A collective that fails or times out is not ended: the job hangs instead.",
        values=frozenset({"0"}),
    ),
    _Variable(
        "TORCH_NCCL_DESYNC_DEBUG NCCL_DESYNC_DEBUG", Level.NOTE, "Every collective is written to the store."
    ),
    _Variable(
        "NCCL_DEBUG",
        Level.NOTE,
        "Every rank prints pages of text.",
        values=frozenset({"INFO", "TRACE"}),
    ),
    _Variable(
        "NCCL_ALGO NCCL_PROTO NCCL_NTHREADS NCCL_BUFFSIZE NCCL_MIN_NCHANNELS NCCL_MAX_NCHANNELS NCCL_MAX_CTAS",
        Level.NOTE,
        "It overrides what NCCL chooses by size and topology, for every collective.",
        _CHOSEN,
        any_value=True,
    ),
    _Variable(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        Level.NOTE,
        "Kernels of different streams queue behind each other, also communication behind compute.",
        _CHOSEN,
        values=frozenset({"1"}),
    ),
    _Variable(
        "PYTORCH_NO_CUDA_MEMORY_CACHING", Level.WARNING, "Every tensor on the GPU is allocated anew, slowly."
    ),
    _Variable(
        "NVIDIA_TF32_OVERRIDE TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        Level.NOTE,
        "It decides on TF32 in the place of the script: speed and results of matrix products change.",
        "Let the script decide (`torch.set_float32_matmul_precision`).",
        any_value=True,
    ),
    _Variable(
        "ACCELERATE_USE_CPU",
        Level.NOTE,
        "accelerate does not use the GPUs.",
        "Unset it unless that is wanted.",
    ),
)


def find(scene: DoctorContext) -> list[Diagnosis]:
    return scene.by_rank(_look)


def _look(facts: Facts) -> list[Diagnosis]:
    found = [told for one in _KNOWN for told in _told(one, facts)]
    found += [*_infiniband(facts), *_detail(facts)]
    return found or [Diagnosis(NAME, Level.OK, "none that is known to slow a job or to change its results")]


def _told(one: _Variable, facts: Facts) -> list[Diagnosis]:
    found = []
    for name in one.names.split():
        value = facts.environment.get(name)
        if value is None or not _counts(one, value):
            continue
        idle = one.on_gpu and not facts.gpus.get("gpus")
        why = f"{one.why} There is no GPU here, so it does nothing." if idle else one.why
        found.append(Diagnosis(NAME, Level.NOTE if idle else one.level, f"{name} is {value}.", why, one.fix))
    return found


def _counts(one: _Variable, value: str) -> bool:
    if one.values:
        return value.strip().upper() in one.values
    return bool(value) if one.any_value else value.strip().lower() not in _OFF


def _infiniband(facts: Facts) -> list[Diagnosis]:
    """Right where there is none, and costly where there is."""
    value = facts.environment.get("NCCL_IB_DISABLE", "")
    if value.strip().lower() in _OFF or not facts.infiniband:
        return []
    return [
        Diagnosis(
            NAME,
            Level.WARNING,
            f"NCCL_IB_DISABLE is {value}, and there is InfiniBand ({facts.infiniband[0].get('name')}).",
            "NCCL takes TCP between hosts, which is several times slower.",
            _UNLESS,
        )
    ]


def _detail(facts: Facts) -> list[Diagnosis]:
    value = facts.environment.get("TORCH_DISTRIBUTED_DEBUG", "")
    if value.upper() != "DETAIL":
        return []
    version = str(facts.torch.get("version") or "")
    crashes = version.startswith("2.13.") and not facts.gpus.get("gpus")
    return [
        Diagnosis(
            NAME,
            Level.PROBLEM if crashes else Level.WARNING,
            "TORCH_DISTRIBUTED_DEBUG is DETAIL.",
            "With gloo, torch 2.13 ends in DDP's constructor with a segmentation fault."
            if crashes
            else "Every collective is compared between ranks before it starts, which takes a collective of its own.",
            "Set it to INFO, which tells nearly as much, or unset it.",
        )
    ]
