"""What the first parting of two runs says of its cause: by what was still equal before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddpcheck.diff.model import DiffSource, FirstDifference, Method, Value
from ddpcheck.diff.record_diff import MOVED, SKETCHED
from ddpcheck.diff.run_input import RunSummary

_EXACT = {
    DiffSource.INIT: "The runs start from different parameters: another seed, another checkpoint, or another way of "
    "initialising the model.",
    DiffSource.FORWARDS: "The runs take another number of forwards for a step: accumulation differs, or one "
    "run skipped a step.",
    DiffSource.DATA: "The runs were fed different data: look at the sampler's seed and epoch, at shuffling, at the "
    "dataset and its transforms.",
    DiffSource.RANDOM: "Parameters and data are the same, random numbers are not: dropout or noise starts from another "
    "seed, or something else draws from the generator.",
    DiffSource.BUFFERS: "Buffers differ while parameters and data were the same: another start, another momentum, or a "
    "forward that computes something else.",
    DiffSource.REWRITTEN: "Parameters were written outside the optimizer's step: a checkpoint loaded late, clamping, "
    "or an average copied in.",
    DiffSource.REDUCED: "Every rank computed the same gradients, the reduction gave something else: the backend, a "
    "communication hook, or another order of additions.",
    DiffSource.STATE: "Optimizer states differ before the step: one run loaded or kept other momenta.",
    DiffSource.HYPER: "Gradients are the same, the optimizer's settings are not.",
    DiffSource.PARAMS: "The same gradients were applied with the same settings: the optimizer's update itself differs "
    "(another implementation, another state, another version of torch).",
}
_NORMED = "running_mean"


def cause_of(method: Method, first: FirstDifference, compared: Mapping[str, int]) -> str:
    """One or two sentences for people."""
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
            "The runs began the step with the same parameters and their gradients differ: the data (not on record), "
            "the loss, the model's code or the software that computes it."
        )
    return (
        "Parameters and inputs are the same, the gradients are not: the computation differs. Look at the loss, the "
        "targets, the model's code, and the software, device and threads that compute it."
    )


def _applied(first: FirstDifference) -> str:
    moved = next((value for value in first.values if value.what == MOVED), None)
    if moved is not None:
        which = "A" if moved.a else "B"
        return f"Gradients were written to between backward and step in run {which} only: clipping, scaling, a hook."
    if any(value.what == SKETCHED and value.a == value.b for value in first.values):
        return (
            "Gradients are the same after the reduction and not when they are applied: clipping, scaling or another "
            "write between backward and step."
        )
    return (
        "Gradients differ from this step on; it was not sketched, so this may be the computation as well as a write "
        "between backward and step. --sketch-every 1 would tell."
    )


def _beyond_rounding(first: FirstDifference) -> str:
    if first.ratio is not None:
        return (
            "One run's gradients are a multiple of the other's: a loss that is summed instead of averaged, a division "
            "by the number of ranks or of accumulated batches that is missing or done twice."
        )
    if first.agreed_until is None:
        return (
            "Gradients are not the same from the first step on: other data in the global batch, ranks that average "
            "over unequal counts, or a model that depends on how the batch is split."
        )
    if first.sudden:
        return (
            f"Gradients were the same up to step {first.agreed_until}: what was done since is the difference, the "
            "update after that step (clipping, learning rate, writes) or the data and loss of this one."
        )
    return (
        "The difference grew step by step, as rounding does in training that amplifies it; "
        "a larger --rtol tells whether it goes on growing."
    )


def of_the_split(
    outlines: tuple[RunSummary, RunSummary], shares: tuple[Sequence[int], Sequence[int]]
) -> list[Value]:
    """What makes the same samples give other gradients; `shares` are the rows of each rank in that step."""
    found: list[Value] = []
    rows, sizes = [sum(share) for share in shares], [len(share) for share in shares]
    if all(rows) and rows[0] != rows[1]:
        found.append(Value("rows of the global batch", rows[0], rows[1]))
    if any(len(set(share)) > 1 for share in shares):
        said = [", ".join(map(str, share[:8])) + (", …" if len(share) > 8 else "") for share in shares]
        found.append(Value("rows of each rank, which averages over its own", said[0], said[1]))
    if not all(sizes) or sizes[0] == sizes[1]:
        return found
    modules = [module for outline in outlines for module in outline.modules.values()]
    names = [str(row[0]) for module in modules for row in module.buffers]
    if any(name.endswith(_NORMED) for name in names):
        each = [
            f"over {total // size} rows" if total else "over its own rows"
            for total, size in zip(rows, sizes, strict=True)
        ]
        found.append(Value("BatchNorm normalises on each rank", each[0], each[1]))
    if outlines[0].draws or outlines[1].draws:
        drawn = ["drawn by each rank" if outline.draws else "none drawn" for outline in outlines]
        found.append(Value("random numbers (dropout, noise)", drawn[0], drawn[1]))
    return found
