"""Agreement and gradient histories of an attempt, for report.json."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.module_key import ModuleKey
from ddpcheck.analysis.timeseries.model import AgreementHistory, GradientHistory
from ddpcheck.analysis.timeseries.recorded import OFF_MEAN, REDUCED, GradientSeries
from ddpcheck.records.kinds.modules import OptimizerRecord

MOST_MODULES = 8


def agreement_history(attempt: Attempt) -> tuple[AgreementHistory, ...]:
    """Modules whose replicas must agree at every step, in the order of wrapping."""
    by_module = attempt.agreement.series
    modules = [
        module for module in attempt.modules() if module in by_module and not attempt.uses_local_sgd(module)
    ]
    return tuple(
        AgreementHistory(
            module=attempt.number(module),
            name=_name(attempt, module),
            ranks=module[0],
            stretches=tuple(sorted(by_module[module].intervals, key=lambda interval: interval.first)),
            cut=by_module[module].cut,
            wrapped_at=_first(rank.as_wrapped[module].where for rank in attempt.of_module(module).values()),
            stepped_at=_first(record.where for record in _optimizers(attempt, module)),
        )
        for module in modules[:MOST_MODULES]
    )


def gradient_history(attempt: Attempt) -> tuple[GradientHistory, ...]:
    """Modules whose gradients were sketched."""
    by_module = attempt.gradients.series
    modules = [module for module in attempt.modules() if module in by_module and by_module[module].points]
    return tuple(_gradients(attempt, module, by_module[module]) for module in modules[:MOST_MODULES])


def _gradients(attempt: Attempt, module: ModuleKey, gradients: GradientSeries) -> GradientHistory:
    numbers = sorted(gradients.points)
    points = [gradients.points[number] for number in numbers]
    # Norms are known to two digits at most.
    series = {
        key: tuple(None if key not in point else float(f"{point[key]:.3g}") for point in points)
        for key in (*module[0], REDUCED, OFF_MEAN)
    }
    return GradientHistory(
        module=attempt.number(module),
        name=_name(attempt, module),
        every=gradients.every,
        steps=tuple(number * gradients.every for number in numbers),
        local={str(rank): series[rank] for rank in module[0]},
        reduced=series[REDUCED],
        off_mean=series[OFF_MEAN],
    )


def _optimizers(attempt: Attempt, module: ModuleKey) -> Iterator[OptimizerRecord]:
    for rank in attempt.of_module(module).values():
        for (_, of), record in sorted(rank.optimizers.items(), key=lambda item: item[0][0]):
            if of == module:
                yield record


def _first(locations: Iterable[str]) -> str:
    return next(filter(None, locations), "")


def _name(attempt: Attempt, module: ModuleKey) -> str:
    return next(rank.latest[module].name for rank in attempt.of_module(module).values())
