"""GPUs of a host: state, connections, and which rank uses which GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ddpcheck.analysis.hardware.statistics import THROTTLING
from ddpcheck.doctor.facts.record import Facts
from ddpcheck.doctor.model import Diagnosis, DoctorContext, Host, check, note, ok, problem, warning
from ddpcheck.formatting import name_ranks, size_text

_AMD_WITHOUT_PACKAGE = "AMD GPUs: install amdsmi"
_VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
# Above what an idle driver or a display holds.
_BUSY_BYTES = 2 << 30
# Throttling reason that is normal for an idle GPU, unlike heat and hardware slowdown.
_POWER_CAP = 0x4


@check("GPUs", order=100)
def gpus(context: DoctorContext) -> list[Diagnosis]:
    return context.by_host(_gpus_of_host)


def _gpus_of_host(facts: Facts) -> list[Diagnosis]:
    gpus = facts.gpus.get("gpus", ())
    if not gpus:
        return _no_gpus(str(facts.gpus.get("note") or facts.gpus.get("error") or "no GPU"))
    diagnoses = [
        *_unreachable_gpus(facts),
        *_lost_gpus(facts),
        *_throttled_gpus(facts),
        *_busy_gpus(facts),
        *_mixed_models(gpus),
        *_missing_nvlinks(gpus),
        *_no_peer_access(facts),
        *_narrow_pcie(facts),
    ]
    return diagnoses or [ok(_gpu_line(facts))]


def _no_gpus(note: str) -> list[Diagnosis]:
    if note.startswith(_AMD_WITHOUT_PACKAGE):
        return [
            warning(
                "This machine has AMD GPUs, but amdsmi is not installed.",
                "GPUs are not sampled: no utilisation, memory, clocks, temperature or topology in reports.",
                "Install the Python package of ROCm (`pip install /opt/rocm/share/amd_smi`) for ddpcheck.",
            )
        ]
    if not any(phrase in note for phrase in ("does not answer", "not installed", "cannot be loaded")):
        return [ok(note)]
    return [
        warning(
            f"A GPU driver is installed, but the GPUs cannot be queried: {note}.",
            "A job may not be able to use them either.",
            f"Run `{'amd-smi' if 'amdsmi' in note else 'nvidia-smi'}`. A common cause is a driver update without a "
            "restart.",
        )
    ]


def _unreachable_gpus(facts: Facts) -> Iterator[Diagnosis]:
    note = str(facts.gpus.get("note") or "")
    if "cannot be reached" in note:
        yield problem(
            f"{note}.",
            "A rank that uses this GPU fails.",
            "Look for Xid errors in `dmesg`, then restart the machine or exclude the GPU.",
        )


def _lost_gpus(facts: Facts) -> Iterator[Diagnosis]:
    lost = [str(gpu["index"]) for gpu, now in _gpus_with_state(facts) if now.get("lost")]
    if lost:
        yield problem(
            f"GPU {', '.join(lost)} is lost: the driver cannot reach it.",
            "A rank that uses this GPU fails.",
            "Look for Xid errors in `dmesg`, then restart the machine or exclude the GPU.",
        )


def _throttled_gpus(facts: Facts) -> Iterator[Diagnosis]:
    for gpu, now in _gpus_with_state(facts):
        bits = int(now.get("throttled") or 0) & ~_POWER_CAP
        reasons = [name for bit, name in THROTTLING.items() if bits & bit]
        if reasons:
            yield warning(
                f"GPU {gpu['index']} is throttled: {', '.join(reasons)}.",
                "All ranks wait for the slowest one in every step.",
                "Check its cooling and power supply (`nvidia-smi -q -d PERFORMANCE`).",
            )


def _busy_gpus(facts: Facts) -> Iterator[Diagnosis]:
    for gpu, now in _gpus_with_state(facts):
        processes = now.get("processes") or {}
        used = int(now.get("memory") or 0)
        if processes and used >= _BUSY_BYTES:
            pids = ", ".join(list(processes)[:4])
            yield warning(
                f"GPU {gpu['index']} is in use: process {pids} holds {size_text(used)} of its memory.",
                "The job gets less memory and compute time on it.",
                "End these processes, or exclude the GPU with CUDA_VISIBLE_DEVICES.",
            )


def _mixed_models(gpus: list[Any]) -> Iterator[Diagnosis]:
    kinds = Counter(f"{gpu.get('name')}, {size_text(gpu.get('memory') or 0)}" for gpu in gpus)
    if len(kinds) > 1:
        models = "; ".join(f"{count} x {kind}" for kind, count in kinds.most_common(4))
        yield warning(
            f"The GPUs of this host differ: {models}.",
            "All ranks wait for the slowest one, and the smallest memory limits the batch.",
            "Use GPUs of one model per job (CUDA_VISIBLE_DEVICES).",
        )


def _missing_nvlinks(gpus: list[Any]) -> Iterator[Diagnosis]:
    counts = [len(gpu.get("nvlinks") or ()) for gpu in gpus]
    if len(set(counts)) > 1:
        few = [str(gpu["index"]) for gpu, count in zip(gpus, counts, strict=True) if count < max(counts)]
        yield warning(
            f"GPU {', '.join(few)} has fewer active NVLinks than the others ({max(counts)}).",
            "A link that is down slows every AllReduce on this host.",
            "Check `nvidia-smi nvlink --status`.",
        )


def _no_peer_access(facts: Facts) -> Iterator[Diagnosis]:
    peers = facts.gpus.get("p2p") or ()
    pairs = [(a, b) for a, row in enumerate(peers) for b, reads in enumerate(row) if a < b and not reads]
    if pairs:
        listed = ", ".join(f"{a}-{b}" for a, b in pairs[:6]) + (" and more" if len(pairs) > 6 else "")
        yield note(
            f"No peer-to-peer access between GPUs {listed}.",
            "NCCL copies through host memory between them, which is slower.",
            "On bare metal, check the IOMMU and ACS settings. Between sockets this can be a hardware limit.",
        )


def _narrow_pcie(facts: Facts) -> Iterator[Diagnosis]:
    """Compares lane counts only: the PCIe generation drops when a link is idle."""
    narrow = []
    for gpu, now in _gpus_with_state(facts):
        most, link = (gpu.get("pcie") or [None, None])[1], (now.get("pcie_link") or [None, None])[1]
        if most and link and link < most:
            narrow.append(f"{gpu['index']} ({link} of {most} lanes)")
    if narrow:
        yield note(
            f"GPU {', '.join(narrow)} uses fewer PCIe lanes than it supports.",
            "Copies between host and GPU have proportionally less bandwidth.",
            "Check the slot's lane count and whether the card is seated correctly.",
        )


def _gpus_with_state(facts: Facts) -> list[tuple[Any, Any]]:
    return list(zip(facts.gpus.get("gpus", ()), facts.gpus.get("now", ()), strict=False))


def _gpu_line(facts: Facts) -> str:
    gpus = facts.gpus["gpus"]
    links = Counter(
        kind for a, row in enumerate(facts.gpus.get("topology", ())) for kind in row[a + 1 :] if kind != "X"
    )
    connected = ", ".join(kind for kind, _ in links.most_common(3))
    line = f"{len(gpus)} x {gpus[0].get('name')}, driver {facts.gpus.get('driver')}"
    return f"{line}, connected by {connected}" if connected else line


@check("GPU kernels", order=105)
def kernels(context: DoctorContext) -> list[Diagnosis]:
    """What ddpcheck needs to read tensors on a GPU with one kernel. Nothing to check on a machine without one."""
    return context.by_rank(_kernels)


def _kernels(facts: Facts) -> list[Diagnosis]:
    triton = facts.torch.get("triton")
    if triton is None or not (facts.torch.get("gpus") or facts.gpus.get("gpus")):
        return []
    missing = [
        *_lacks(
            not triton.get("version"),
            "Triton is not installed",
            "Install the triton that belongs to this torch",
        ),
        *_lacks(
            not triton.get("compiler"),
            "there is no C compiler, which Triton needs once per kernel",
            "Install gcc or clang in the image, or set CC",
        ),
        *_lacks(
            not triton.get("headers"),
            "the headers of this Python (Python.h) are missing, which Triton compiles against",
            "Install python3-dev, or the headers of this Python",
        ),
        *_lacks(
            not triton.get("cache_writable"),
            f"Triton cannot write its cache folder {triton.get('cache')}",
            "Set TRITON_CACHE_DIR to a folder that can be written",
        ),
    ]
    if not missing:
        return [ok(f"Triton {triton['version']}, {triton['compiler']}, cache {triton['cache']}")]
    return [
        warning(
            "ddpcheck cannot compile its GPU kernel: " + "; ".join(what for what, _ in missing) + ".",
            "Tensors on the GPU are then read by operators of torch: few steps are checked, and DDP605 says so.",
            ". ".join(fix for _, fix in missing) + ".",
        )
    ]


def _lacks(lacks: bool, what: str, fix: str) -> list[tuple[str, str]]:
    return [(what, fix)] if lacks else []


@check("first run on GPUs", order=115)
def first_run(context: DoctorContext) -> list[Diagnosis]:
    """What to look at: ddpcheck was developed without a GPU."""
    with_gpus = [
        host for host in context.hosts if host.first.gpus.get("gpus") or host.first.torch.get("gpus")
    ]
    if not with_gpus:
        return []
    message = (
        "`ddpcheck selftest` checks kernels, weights and cost on these GPUs. In the first job, compare the final "
        'weights with and without ddpcheck, and look at "ddpcheck took", DDP605 and the ranks of each GPU'
    )
    return [ok(message, hosts=tuple(host.name for host in with_gpus) if context.is_job else ())]


@check("GPUs of ranks", order=110)
def gpu_sharing(context: DoctorContext) -> list[Diagnosis]:
    diagnoses = context.by_rank(_visible_devices)
    for host in context.hosts if context.is_job else ():
        diagnoses += _shared_gpus(host)
    return diagnoses


def _visible_devices(facts: Facts) -> list[Diagnosis]:
    value = facts.environment.get(_VISIBLE_VARIABLE)
    count = len(facts.gpus.get("gpus", ()))
    if value is None or not count:
        return []
    visible = visible_gpus(facts)
    if visible.unknown:
        return [
            problem(
                f"{_VISIBLE_VARIABLE} is {value}, but {visible.unknown} is none of the {count} GPUs.",
                f"CUDA ignores that entry and all after it: {len(visible.uuids)} of {count} GPUs can be used.",
                f"Use indices from 0 to {count - 1}, or UUIDs.",
            )
        ]
    if not visible.uuids:
        return [
            warning(
                f"{_VISIBLE_VARIABLE} hides all {count} GPUs.",
                "The job runs on the CPU, or fails at the first `.cuda()`.",
                f"Unset {_VISIBLE_VARIABLE} unless this is intended.",
            )
        ]
    return []


def _shared_gpus(host: Host) -> list[Diagnosis]:
    """Assumes that each rank uses the GPU of its local rank, as nearly all scripts do."""
    users: dict[str, list[int]] = {}
    for facts in host.facts:
        visible = visible_gpus(facts).uuids
        if visible and facts.rank is not None:
            users.setdefault(visible[(facts.local_rank or 0) % len(visible)], []).append(facts.rank)
    if not users:
        return []
    shared = {gpu: ranks for gpu, ranks in users.items() if len(ranks) > 1}
    if not shared:
        return [ok("one per rank", hosts=(host.name,))]
    listed = "; ".join(f"{name_ranks(ranks)}: {gpu}" for gpu, ranks in list(shared.items())[:4])
    return [
        problem(
            f"Several ranks would use the same GPU ({listed}).",
            "NCCL does not support two ranks of a group on one GPU. With gloo they share its memory and compute time.",
            f"Start at most one rank per GPU, and assign the GPUs with {_VISIBLE_VARIABLE} or "
            "`torch.cuda.set_device(LOCAL_RANK)`.",
            hosts=(host.name,),
            ranks=tuple(sorted(rank for ranks in shared.values() for rank in ranks)),
        )
    ]


@dataclass(frozen=True)
class VisibleGpus:
    """UUIDs in CUDA's order, and the first entry of the variable that is no GPU: CUDA stops there."""

    uuids: tuple[str, ...]
    unknown: str = ""


def visible_gpus(facts: Facts) -> VisibleGpus:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves visible. With mixed models CUDA may order them unlike NVML."""
    gpus = facts.gpus.get("gpus", ())
    uuids = [str(gpu.get("uuid") or gpu.get("index")) for gpu in gpus]
    value = facts.environment.get(_VISIBLE_VARIABLE)
    if value is None:
        return VisibleGpus(tuple(uuids))
    slices = [str(one["uuid"]) for gpu in gpus for one in gpu.get("mig", ()) if one.get("uuid")]
    visible: list[str] = []
    for word in filter(None, (part.strip() for part in value.split(","))):
        uuid = _gpu_uuid(word, uuids, slices)
        if not uuid:
            return VisibleGpus(tuple(visible), "" if word == "-1" else word)
        visible.append(uuid)
    return VisibleGpus(tuple(visible))


def _gpu_uuid(word: str, uuids: list[str], slices: list[str]) -> str:
    if word.isdecimal():
        return uuids[int(word)] if int(word) < len(uuids) else ""
    # A unique prefix of a UUID is enough.
    matching = [one for one in (*uuids, *slices) if one.startswith(word)]
    return matching[0] if len(matching) == 1 else ""
