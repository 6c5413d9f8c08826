"""Environment variables that change speed or results, or make a job fail."""

from __future__ import annotations

from dataclasses import dataclass

from ddpcheck.analysis.finding import Severity
from ddpcheck.doctor.facts.record import Facts
from ddpcheck.doctor.model import Diagnosis, DoctorContext, check, diagnosis, ok, warning

_OFF = frozenset({"", "0", "false", "off", "no", "n", "f"})
_UNSET_UNLESS_DEBUGGING = "Unset it unless you are debugging."
_UNSET_UNLESS_MEASURED = "Unset it unless you have measured that it helps."


@dataclass(frozen=True)
class _KnownVariable:
    """Reported if the value is one of `values`; without `values`, if it is anything but off."""

    names: str
    severity: Severity
    cause: str
    fix: str = _UNSET_UNLESS_DEBUGGING
    values: frozenset[str] = frozenset()
    # Report any value that is not empty.
    any_value: bool = False
    # Has no effect without a GPU: then it is only a note.
    on_gpu: bool = True


_KNOWN = (
    _KnownVariable(
        "CUDA_LAUNCH_BLOCKING",
        Severity.WARNING,
        "Python waits for every kernel: communication and data loading do not overlap with compute.",
    ),
    _KnownVariable(
        "NCCL_P2P_DISABLE",
        Severity.WARNING,
        "GPUs of a host cannot access each other's memory, and NVLink is not used.",
    ),
    _KnownVariable(
        "NCCL_SHM_DISABLE", Severity.WARNING, "Ranks of a host may communicate through the network instead."
    ),
    _KnownVariable(
        "TORCH_NCCL_BLOCKING_WAIT NCCL_BLOCKING_WAIT",
        Severity.WARNING,
        "Python waits for every collective: nothing overlaps with it.",
    ),
    _KnownVariable(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING NCCL_ASYNC_ERROR_HANDLING",
        Severity.WARNING,
        "A collective that fails or times out is not aborted: the job hangs.",
        values=frozenset({"0"}),
    ),
    _KnownVariable(
        "TORCH_NCCL_DESYNC_DEBUG NCCL_DESYNC_DEBUG",
        Severity.NOTE,
        "Every collective is written to the store.",
    ),
    _KnownVariable(
        "NCCL_DEBUG",
        Severity.NOTE,
        "Every rank prints long logs.",
        values=frozenset({"INFO", "TRACE"}),
    ),
    _KnownVariable(
        "NCCL_ALGO NCCL_PROTO NCCL_NTHREADS NCCL_BUFFSIZE NCCL_MIN_NCHANNELS NCCL_MAX_NCHANNELS NCCL_MAX_CTAS",
        Severity.NOTE,
        "It overrides what NCCL chooses by size and topology, for every collective.",
        _UNSET_UNLESS_MEASURED,
        any_value=True,
    ),
    _KnownVariable(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        Severity.NOTE,
        "Kernels of different streams are serialized: communication waits for compute.",
        _UNSET_UNLESS_MEASURED,
        values=frozenset({"1"}),
    ),
    _KnownVariable(
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        Severity.WARNING,
        "Every GPU tensor is allocated with a slow driver call.",
    ),
    _KnownVariable(
        "NVIDIA_TF32_OVERRIDE TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        Severity.NOTE,
        "It overrides the script's choice of TF32: speed and results of matrix products change.",
        "Let the script decide (`torch.set_float32_matmul_precision`).",
        any_value=True,
    ),
    _KnownVariable(
        "ACCELERATE_USE_CPU",
        Severity.NOTE,
        "accelerate does not use the GPUs.",
        "Unset it unless this is intended.",
    ),
)


@check("variables", order=160)
def variables(context: DoctorContext) -> list[Diagnosis]:
    return context.by_rank(_variables)


def _variables(facts: Facts) -> list[Diagnosis]:
    diagnoses = [each for known in _KNOWN for each in _matches(known, facts)]
    diagnoses += [*_infiniband_disabled(facts), *_debug_detail(facts)]
    return diagnoses or [ok("none set that slows a job or changes its results")]


def _matches(known: _KnownVariable, facts: Facts) -> list[Diagnosis]:
    diagnoses = []
    for name in known.names.split():
        value = facts.environment.get(name)
        if value is None or not _applies(known, value):
            continue
        unused = known.on_gpu and not facts.gpus.get("gpus")
        cause = f"{known.cause} This host has no GPU, so it has no effect." if unused else known.cause
        diagnoses.append(
            diagnosis(Severity.NOTE if unused else known.severity, f"{name} is {value}.", cause, known.fix)
        )
    return diagnoses


def _applies(known: _KnownVariable, value: str) -> bool:
    if known.values:
        return value.strip().upper() in known.values
    return bool(value) if known.any_value else value.strip().lower() not in _OFF


def _infiniband_disabled(facts: Facts) -> list[Diagnosis]:
    """Only a warning if the host has InfiniBand."""
    value = facts.environment.get("NCCL_IB_DISABLE", "")
    if value.strip().lower() in _OFF or not facts.infiniband:
        return []
    return [
        warning(
            f"NCCL_IB_DISABLE is {value}, but this host has InfiniBand ({facts.infiniband[0].get('name')}).",
            "NCCL uses TCP between hosts, which is several times slower.",
            _UNSET_UNLESS_DEBUGGING,
        )
    ]


def _debug_detail(facts: Facts) -> list[Diagnosis]:
    value = facts.environment.get("TORCH_DISTRIBUTED_DEBUG", "")
    if value.upper() != "DETAIL":
        return []
    version = str(facts.torch.get("version") or "")
    crashes = version.startswith("2.13.") and not facts.gpus.get("gpus")
    return [
        diagnosis(
            Severity.ERROR if crashes else Severity.WARNING,
            "TORCH_DISTRIBUTED_DEBUG is DETAIL.",
            "With gloo, torch 2.13 crashes in DDP's constructor (segmentation fault)."
            if crashes
            else "Every collective is compared between ranks before it starts, which takes an additional collective.",
            "Set it to INFO or unset it.",
        )
    ]
