"""What one rank's file tells of a run as a whole, read once: its models, optimizers, loaders and length."""

from __future__ import annotations

from dataclasses import dataclass, field

from ddpcheck.diff.run_input import Side
from ddpcheck.errors import NotComparable
from ddpcheck.records.schema import (
    BackwardRecord,
    BatchRecord,
    CommHookRecord,
    DigestRecord,
    HyperRecord,
    LoaderRecord,
    ModuleRecord,
    OptimizerRecord,
    Stage,
)


@dataclass
class Outline:
    """All of it from the first rank."""

    # As wrapped, by number.
    modules: dict[int, ModuleRecord] = field(default_factory=dict)
    optimizers: dict[int, str] = field(default_factory=dict)
    loaders: dict[int, LoaderRecord] = field(default_factory=dict)
    hooks: list[str] = field(default_factory=list)
    steps: int = 0
    sketched: bool = False
    # Whether a GradScaler is at work: gradients are then computed in half precision.
    scaled: bool = False
    # Whether random numbers are drawn in training: dropout, noise.
    draws: bool = False


def outline(side: Side) -> Outline:
    found = Outline()
    for record in side.records(side.first_rank):
        match record:
            case ModuleRecord():
                found.modules.setdefault(record.module, record)
            case OptimizerRecord():
                found.optimizers.setdefault(record.optimizer, record.name)
            case LoaderRecord():
                found.loaders.setdefault(record.loader, record)
            case CommHookRecord():
                found.hooks.append(record.hook)
            case DigestRecord() if record.stage == Stage.PARAMS.value:
                found.steps = max(found.steps, record.step + 1)
            case BackwardRecord():
                found.sketched = found.sketched or bool(record.local)
            case HyperRecord():
                found.scaled = found.scaled or "GradScaler.scale" in record.changed
            case BatchRecord():
                found.draws = found.draws or bool(record.drew)
    return found


def check_models(a: Outline, b: Outline) -> None:
    """NotComparable, with the first thing in which the models are not the same."""
    if not a.modules or not b.modules:
        which = "A" if not a.modules else "B"
        raise NotComparable(f"no DDP module was wrapped in run {which}: there is nothing to compare")
    if len(a.modules) != len(b.modules):
        raise NotComparable(
            f"the runs train different models: run A wraps {len(a.modules)} in DDP, run B {len(b.modules)}"
        )
    for number, (one, other) in enumerate(zip(a.modules.values(), b.modules.values(), strict=True)):
        _check_parameters(number, one, other)


def _check_parameters(number: int, a: ModuleRecord, b: ModuleRecord) -> None:
    shapes_a = {str(row[0]): row[2] for row in a.parameters}
    shapes_b = {str(row[0]): row[2] for row in b.parameters}
    for name in [*shapes_a, *shapes_b]:
        said = [_shape(shapes.get(name)) for shapes in (shapes_a, shapes_b)]
        if said[0] != said[1]:
            raise NotComparable(
                f"the runs train different models: parameter {name} of module {number} "
                f"is {said[0]} in run A and {said[1]} in run B"
            )


def _shape(shape: list[int] | None) -> str:
    if shape is None:
        return "missing"
    return "x".join(map(str, shape)) or "a scalar"
