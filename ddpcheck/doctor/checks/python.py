"""The Python of the ranks: interpreter, torch build, injection of ddpcheck."""

from __future__ import annotations

from ddpcheck.doctor.facts.record import Facts, Section
from ddpcheck.doctor.model import Diagnosis, DoctorContext, check, note, ok, problem, warning

_OLDEST_PYTHON = (3, 10)
_MANUAL_IMPORT = "Or add `import ddpcheck.auto` at the top of the script."
_FLAG_OPTIONS = {"isolated": "-I", "ignore_environment": "-E", "no_site": "-S"}


@check("python", order=20)
def python(context: DoctorContext) -> list[Diagnosis]:
    return context.by_rank(_interpreter)


def _interpreter(facts: Facts) -> list[Diagnosis]:
    python = facts.python
    if python.get("error"):
        return [
            problem(
                f"Python cannot be run: {python['error']}.",
                "Ranks are started with it.",
                "Choose another one with --python.",
            )
        ]
    diagnoses = [*_too_old(str(python.get("version", ""))), *_interpreter_flags(facts)]
    return diagnoses or [ok(f"{python.get('version')}, {python.get('executable')}")]


def _too_old(version: str) -> list[Diagnosis]:
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if len(numbers) < 2 or numbers >= _OLDEST_PYTHON:
        return []
    return [
        problem(
            f"Python {version} is not supported.",
            "ddpcheck needs Python 3.10 or newer in the ranks.",
            "Use a newer Python for the job.",
        )
    ]


def _interpreter_flags(facts: Facts) -> list[Diagnosis]:
    flags = facts.python.get("flags") or {}
    diagnoses = []
    if flags.get("safe_path") and not flags.get("isolated"):
        diagnoses.append(
            note(
                "The folder of a script is not on its import path (PYTHONSAFEPATH or -P).",
                "A training script that imports a file of its own folder fails.",
                "Unset PYTHONSAFEPATH, or put the folder on PYTHONPATH.",
            )
        )
    if flags.get("optimize"):
        diagnoses.append(
            note(
                "Python runs with -O or PYTHONOPTIMIZE: assertions are disabled.",
                "Assertions of the training script are not executed.",
                "Unset PYTHONOPTIMIZE unless this is intended.",
            )
        )
    return diagnoses


@check("torch", order=30)
def torch(context: DoctorContext) -> list[Diagnosis]:
    return context.by_rank(_torch)


def _torch(facts: Facts) -> list[Diagnosis]:
    torch = facts.torch
    if torch.get("error"):
        return [_import_failure(str(torch["error"]))]
    if "gloo" not in torch.get("backends", ()) and "nccl" not in torch.get("backends", ()):
        return [
            problem(
                f"torch {torch.get('version')} has neither gloo nor NCCL.",
                "DDP needs one of them to reduce gradients.",
                "Install a build of torch with distributed support.",
            )
        ]
    return [*_torch_devices(facts)] or [ok(_torch_line(facts))]


def _import_failure(error: str) -> Diagnosis:
    absent = "No module named 'torch'" in error
    return problem(
        "torch is not installed in this Python." if absent else f"torch cannot be imported: {error}.",
        "No rank can start.",
        "Activate the job's environment, or choose its Python with --python."
        if absent
        else "Run `python -c 'import torch'`. Common causes are a missing library and a broken installation.",
        evidence={"error": error},
    )


def _torch_devices(facts: Facts) -> list[Diagnosis]:
    torch, count = facts.torch, len(facts.gpus.get("gpus", ()))
    version = torch.get("version")
    if not count or torch.get("gpus"):
        return []
    if not torch.get("cuda"):
        return [
            warning(
                f"torch {version} is built without CUDA, but this host has {count} GPUs.",
                "The job runs on the CPU, or fails at the first `.cuda()`.",
                "Install a build of torch with CUDA that the driver supports.",
            )
        ]
    if facts.environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return []  # reported by the check of CUDA_VISIBLE_DEVICES
    warnings = "; ".join(torch.get("warnings", ()))
    return [
        problem(
            f"torch {version} (CUDA {torch['cuda']}) cannot use any of the {count} GPUs"
            + (f": {warnings}." if warnings else "."),
            f"The driver is {facts.gpus.get('driver', 'unknown')}; it is usually too old for this build of "
            "torch.",
            "Update the driver, or install a build of torch for an older CUDA.",
        )
    ]


def _torch_line(facts: Facts) -> str:
    torch = facts.torch
    parts = [str(torch.get("version")), ", ".join(torch.get("backends", ()))]
    parts += [f"CUDA {torch['cuda']}"] if torch.get("cuda") else []
    parts += [f"NCCL {torch['nccl']}"] if torch.get("nccl") else []
    return ", ".join(parts)


@check("injection", order=40)
def injection(context: DoctorContext) -> list[Diagnosis]:
    return context.by_rank(_injection)


def _injection(facts: Facts) -> list[Diagnosis]:
    state = facts.injection
    if not state:
        return []  # not requested
    if state.get("armed"):
        also = f"; {state['sitecustomize']} runs as well" if state.get("sitecustomize") else ""
        return [ok(f"works in {state.get('into')}{also}")]
    what, fix = _blocked_by(state)
    return [
        problem(
            f"ddpcheck cannot be injected into {state.get('into', 'the rank')}: {what}.",
            "`ddpcheck run` would record no rank (DDP601).",
            f"{fix} {_MANUAL_IMPORT}",
            evidence=dict(state),
        )
    ]


def _blocked_by(state: Section) -> tuple[str, str]:
    flags = [_FLAG_OPTIONS[flag] for flag in state.get("flags", ()) if flag in _FLAG_OPTIONS]
    if state.get("error"):
        return str(state["error"]), "Make sure that this Python starts."
    if "-I" in flags or "-E" in flags:
        option = "-I" if "-I" in flags else "-E"
        return f"Python runs with {option}, which ignores PYTHONPATH", f"Start it without {option}."
    if flags:
        return "Python runs with -S, which imports no sitecustomize", "Start it without -S."
    if not state.get("first_on_path"):
        return (
            "ddpcheck's folder is no longer first on PYTHONPATH",
            "A wrapper, a module file or the launcher (srun --export) overwrites PYTHONPATH: make it append instead.",
        )
    if state.get("sitecustomize"):
        return (
            f"{state['sitecustomize']} is imported instead of ddpcheck's",
            "Remove that file from the path, or place it after PYTHONPATH.",
        )
    return (
        "its folder cannot be read",
        "Install ddpcheck at a path that exists on every host and in every container.",
    )
