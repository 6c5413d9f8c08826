"""What the first difference of two runs, and their environments, say of the cause."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields

from ddpcheck.diff.model import DiffSource, FirstDifference, Method, Value
from ddpcheck.diff.record_diff import MOVED, SKETCHED
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


_EXACT = {
    DiffSource.INIT: "The runs start from different parameters: another seed, checkpoint or initialization.",
    DiffSource.FORWARDS: "The number of forwards per step differs: gradient accumulation differs, or one run "
    "skipped a step.",
    DiffSource.DATA: "The runs trained on different data: check the sampler's seed and epoch, shuffling, the dataset "
    "and its transforms.",
    DiffSource.RANDOM: "Parameters and data are equal, random numbers differ: dropout or noise uses another seed, or "
    "other code draws from the generator.",
    DiffSource.BUFFERS: "Buffers differ while parameters and data are equal: other initial buffers, or another "
    "momentum or forward.",
    DiffSource.REWRITTEN: "Parameters were written outside the optimizer's step: a checkpoint loaded late, clamping, "
    "or an average copied in.",
    DiffSource.REDUCED: "Local gradients are equal, reduced gradients differ: the backend, a communication hook, or "
    "another order of additions.",
    DiffSource.STATE: "Optimizer states differ before the step: one run loaded or kept another state.",
    DiffSource.HYPER: "Gradients are equal, the optimizer's hyperparameters differ.",
    DiffSource.PARAMS: "Gradients and hyperparameters are equal: the optimizer's update differs (another "
    "implementation, state or version of torch).",
}
_NORMED = "running_mean"


def cause_of(method: Method, first: FirstDifference, compared: Mapping[str, int]) -> str:
    """The cause in one or two sentences."""
    if first.stage is DiffSource.LOCAL:
        return _computation(compared)
    if first.stage is DiffSource.APPLIED:
        return _applied(first)
    if method is Method.ROUNDING and first.stage is DiffSource.REDUCED:
        return _beyond_rounding(first)
    return _EXACT[first.stage]


def _computation(compared: Mapping[str, int]) -> str:
    if not compared.get(DiffSource.DATA.value):
        return (
            "Parameters are equal, gradients differ: the data (not recorded), the loss, the model's code or the "
            "software differs."
        )
    return (
        "Parameters and inputs are equal, gradients differ: the computation differs. Check the loss, the targets, the "
        "model's code, and the software, device and number of threads."
    )


def _applied(first: FirstDifference) -> str:
    moved = next((value for value in first.values if value.what == MOVED), None)
    if moved is not None:
        which = "A" if moved.a else "B"
        return f"Gradients were modified between backward and step in run {which} only: clipping, scaling or a hook."
    if any(value.what == SKETCHED and value.a == value.b for value in first.values):
        return (
            "Gradients are equal after the reduction and differ when applied: clipping, scaling or another write "
            "between backward and step."
        )
    return (
        "Gradients differ from this step on. It was not sketched, so the cause is either the computation or a write "
        "between backward and step. Run both with --sketch-every 1 to find out."
    )


def _beyond_rounding(first: FirstDifference) -> str:
    if first.ratio is not None:
        return (
            "One run's gradients are a multiple of the other's: a loss that is summed instead of averaged, or a "
            "missing or repeated division by the number of ranks or of accumulated batches."
        )
    if first.agreed_until is None:
        return (
            "Gradients differ from the first step on: other data in the global batch, ranks that average over unequal "
            "counts, or a model that depends on how the batch is split."
        )
    if first.sudden:
        return (
            f"Gradients were equal up to step {first.agreed_until}: the update after that step (clipping, learning "
            "rate, writes) or the data and loss of this step differ."
        )
    return (
        "The difference grew step by step, as rounding errors do in training that amplifies them. "
        "Compare again with a larger --rtol to see whether it keeps growing."
    )


def batch_split_differences(
    summaries: tuple[RunSummary, RunSummary], shares: tuple[Sequence[int], Sequence[int]]
) -> list[Value]:
    """Reasons why the same samples give other gradients; `shares` are the rows of each rank in that step."""
    values: list[Value] = []
    rows, sizes = [sum(share) for share in shares], [len(share) for share in shares]
    if all(rows) and rows[0] != rows[1]:
        values.append(Value("rows of the global batch", rows[0], rows[1]))
    if any(len(set(share)) > 1 for share in shares):
        listed = [", ".join(map(str, share[:8])) + (", …" if len(share) > 8 else "") for share in shares]
        values.append(Value("rows of each rank, which averages over its own", listed[0], listed[1]))
    if not all(sizes) or sizes[0] == sizes[1]:
        return values
    modules = [module for summary in summaries for module in summary.modules.values()]
    names = [str(row[0]) for module in modules for row in module.buffers]
    if any(name.endswith(_NORMED) for name in names):
        each = [
            f"over {total // size} rows" if total else "over its own rows"
            for total, size in zip(rows, sizes, strict=True)
        ]
        values.append(Value("BatchNorm normalises on each rank", each[0], each[1]))
    if summaries[0].draws or summaries[1].draws:
        drawn = ["drawn by each rank" if summary.draws else "none drawn" for summary in summaries]
        values.append(Value("random numbers (dropout, noise)", drawn[0], drawn[1]))
    return values
