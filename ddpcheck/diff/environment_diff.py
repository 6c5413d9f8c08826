"""Differences of two runs in software, machine, command line and settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields

from ddpcheck.diff.model import Value
from ddpcheck.diff.run_input import RunInput, RunSummary

# Variables that differ in every run, or follow from the world size.
_PER_RUN_VARIABLES = frozenset(
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


def environment_differences(
    a: RunInput, b: RunInput, summaries: tuple[RunSummary, RunSummary]
) -> tuple[Value, ...]:
    """Values that differ, software first."""
    return (*_headers(a, b), *_summaries(*summaries), *_command(a, b), *_environment(a, b))


def _headers(a: RunInput, b: RunInput) -> Iterator[Value]:
    for name in _HEADER:
        yield from _if_different(name, _values_of_ranks(a, name), _values_of_ranks(b, name))
    yield from _if_different("hosts", _values_of_ranks(a, "host"), _values_of_ranks(b, "host"))
    yield from _if_different("world size", a.world_size, b.world_size)
    yield from _if_different("ddpcheck", a.recorded_by, b.recorded_by)


def _values_of_ranks(run: RunInput, name: str) -> str:
    return ", ".join(sorted({str(getattr(header, name)) for header in run.headers.values()}))


def _summaries(a: RunSummary, b: RunSummary) -> Iterator[Value]:
    for number, (one, other) in enumerate(zip(a.modules.values(), b.modules.values(), strict=True)):
        where = f" of module {number}" if len(a.modules) > 1 else ""
        yield from _if_different(f"class{where}", one.name, other.name)
        dtypes = [", ".join(sorted({str(row[1]) for row in m.parameters})) for m in (one, other)]
        yield from _if_different(f"dtypes{where}", dtypes[0], dtypes[1])
        yield from _mappings(f"DDP option{where}", one.options, other.options)
    yield from _if_different("optimizers", _listed(a.optimizers), _listed(b.optimizers))
    yield from _if_different("communication hooks", ", ".join(a.hooks), ", ".join(b.hooks))
    for number in sorted(a.loaders.keys() & b.loaders.keys()):
        loaders = a.loaders[number], b.loaders[number]
        for field in fields(loaders[0]):
            if field.name not in ("loader", "replicas", "share"):
                values = [getattr(loader, field.name) for loader in loaders]
                yield from _if_different(f"data loader {number}: {field.name}", *values)


def _listed(names: Mapping[int, str]) -> str:
    return ", ".join(names[number] for number in sorted(names))


def _command(a: RunInput, b: RunInput) -> Iterator[Value]:
    commands = [" ".join(map(str, run.description.get("command") or ())) for run in (a, b)]
    yield from _if_different("command", commands[0], commands[1])
    yield from _if_different("arguments", " ".join(a.header().argv), " ".join(b.header().argv))


def _environment(a: RunInput, b: RunInput) -> Iterator[Value]:
    kept = [
        {name: value for name, value in run.header().environment.items() if name not in _PER_RUN_VARIABLES}
        for run in (a, b)
    ]
    yield from _mappings("environment", kept[0], kept[1])


def _mappings(what: str, a: Mapping[str, object], b: Mapping[str, object]) -> Iterator[Value]:
    for name in sorted(a.keys() | b.keys()):
        yield from _if_different(f"{what}: {name}", a.get(name), b.get(name))


def _if_different(what: str, a: object, b: object) -> Iterator[Value]:
    if a != b:
        yield Value(what, a, b)
