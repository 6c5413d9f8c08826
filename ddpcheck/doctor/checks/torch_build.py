"""Whether torch is there, with the backends and the device support that the machine calls for."""

from __future__ import annotations

from ddpcheck.doctor.context import DoctorContext
from ddpcheck.doctor.diagnosis import Diagnosis, Level
from ddpcheck.doctor.facts.record import Facts

NAME = "torch"


def find(scene: DoctorContext) -> list[Diagnosis]:
    return scene.by_rank(_look)


def _look(facts: Facts) -> list[Diagnosis]:
    torch = facts.torch
    if torch.get("error"):
        return [_cannot_be_imported(str(torch["error"]))]
    if "gloo" not in torch.get("backends", ()) and "nccl" not in torch.get("backends", ()):
        return [
            Diagnosis(
                NAME,
                Level.PROBLEM,
                f"torch {torch.get('version')} has neither gloo nor NCCL.",
                "DDP has nothing to reduce gradients with.",
                "Install a build of torch with distributed support.",
            )
        ]
    return [*_devices(facts)] or [Diagnosis(NAME, Level.OK, _line(facts))]


def _cannot_be_imported(error: str) -> Diagnosis:
    absent = "No module named 'torch'" in error
    return Diagnosis(
        NAME,
        Level.PROBLEM,
        "torch is not installed in this Python." if absent else f"torch cannot be imported: {error}.",
        "No rank can start with it.",
        "Activate the job's environment, or name its Python with --python."
        if absent
        else "Try `python -c 'import torch'`; a library that is missing or a broken installation are usual.",
        evidence={"error": error},
    )


def _devices(facts: Facts) -> list[Diagnosis]:
    torch, there = facts.torch, len(facts.gpus.get("gpus", ()))
    version = torch.get("version")
    if not there or torch.get("gpus"):
        return []
    if not torch.get("cuda"):
        return [
            Diagnosis(
                NAME,
                Level.WARNING,
                f"torch {version} is built without CUDA, and there are {there} GPUs.",
                "The job runs on processors, or fails at the first `.cuda()`.",
                "Install the build of torch for the driver's version of CUDA.",
            )
        ]
    if facts.environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return []  # told where it belongs
    said = "; ".join(torch.get("warnings", ()))
    return [
        Diagnosis(
            NAME,
            Level.PROBLEM,
            f"torch {version} (CUDA {torch['cuda']}) cannot use any of the {there} GPUs"
            + (f": {said}." if said else "."),
            f"The driver is {facts.gpus.get('driver', 'unknown')}; most often it is older than what this build "
            "of torch needs.",
            "Update the driver, or install a build of torch for an older CUDA.",
        )
    ]


def _line(facts: Facts) -> str:
    torch = facts.torch
    parts = [str(torch.get("version")), ", ".join(torch.get("backends", ()))]
    parts += [f"CUDA {torch['cuda']}"] if torch.get("cuda") else []
    parts += [f"NCCL {torch['nccl']}"] if torch.get("nccl") else []
    return ", ".join(parts)
