"""What is not the same about two runs from the outside: software, machine, command line, settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields

from ddpcheck.diff.model import Value
from ddpcheck.diff.run_input import RunInput, RunSummary

# Another one for every start of a job, or told already by the world size.
_ALWAYS_OTHER = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "ROLE_RANK",
        "NODE_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_WORLD_SIZE",
        "ROLE_WORLD_SIZE",
        "ROLE_NAME",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_RESTART_COUNT",
        "SLURM_JOB_ID",
        "SLURM_STEP_ID",
        "SLURM_PROCID",
        "SLURM_LOCALID",
        "SLURM_NODEID",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "PMI_RANK",
        "PMI_SIZE",
        "SLURM_NTASKS",
    }
)
_HEADER = ("torch", "python", "backend", "device")


def suspects(a: RunInput, b: RunInput, outlines: tuple[RunSummary, RunSummary]) -> tuple[Value, ...]:
    """Each with its value in both runs; the software first."""
    return (*_headers(a, b), *_outlines(*outlines), *_command(a, b), *_environment(a, b))


def _headers(a: RunInput, b: RunInput) -> Iterator[Value]:
    for name in _HEADER:
        yield from _unless_same(name, _over_ranks(a, name), _over_ranks(b, name))
    yield from _unless_same("hosts", _over_ranks(a, "host"), _over_ranks(b, "host"))
    yield from _unless_same("world size", a.world_size, b.world_size)
    yield from _unless_same("ddpcheck", a.recorded_by, b.recorded_by)


def _over_ranks(side: RunInput, name: str) -> str:
    return ", ".join(sorted({str(getattr(header, name)) for header in side.headers.values()}))


def _outlines(a: RunSummary, b: RunSummary) -> Iterator[Value]:
    for number, (one, other) in enumerate(zip(a.modules.values(), b.modules.values(), strict=True)):
        where = f" of module {number}" if len(a.modules) > 1 else ""
        yield from _unless_same(f"class{where}", one.name, other.name)
        dtypes = [", ".join(sorted({str(row[1]) for row in m.parameters})) for m in (one, other)]
        yield from _unless_same(f"dtypes{where}", dtypes[0], dtypes[1])
        yield from _mappings(f"DDP option{where}", one.options, other.options)
    yield from _unless_same("optimizers", _listed(a.optimizers), _listed(b.optimizers))
    yield from _unless_same("communication hooks", ", ".join(a.hooks), ", ".join(b.hooks))
    for number in sorted(a.loaders.keys() & b.loaders.keys()):
        loaders = a.loaders[number], b.loaders[number]
        for field in fields(loaders[0]):
            if field.name not in ("loader", "replicas", "share"):
                said = [getattr(loader, field.name) for loader in loaders]
                yield from _unless_same(f"data loader {number}: {field.name}", *said)


def _listed(names: Mapping[int, str]) -> str:
    return ", ".join(names[number] for number in sorted(names))


def _command(a: RunInput, b: RunInput) -> Iterator[Value]:
    commands = [" ".join(map(str, side.description.get("command") or ())) for side in (a, b)]
    yield from _unless_same("command", commands[0], commands[1])
    yield from _unless_same("arguments", " ".join(a.header().argv), " ".join(b.header().argv))


def _environment(a: RunInput, b: RunInput) -> Iterator[Value]:
    kept = [
        {name: value for name, value in side.header().environment.items() if name not in _ALWAYS_OTHER}
        for side in (a, b)
    ]
    yield from _mappings("environment", kept[0], kept[1])


def _mappings(what: str, a: Mapping[str, object], b: Mapping[str, object]) -> Iterator[Value]:
    for name in sorted(a.keys() | b.keys()):
        yield from _unless_same(f"{what}: {name}", a.get(name), b.get(name))


def _unless_same(what: str, a: object, b: object) -> Iterator[Value]:
    if a != b:
        yield Value(what, a, b)
