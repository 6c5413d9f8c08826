"""DDP213: ranks train in different states."""

from __future__ import annotations

from typing import Any

from ddpcheck.analysis.aggregate.agreement import outlier_ranks
from ddpcheck.analysis.aggregate.rank_data import ModuleKey
from ddpcheck.analysis.collectors.loss_form import LossFormCollector, LossSettingDifference
from ddpcheck.analysis.collectors.program_state import (
    STATE_PROBES,
    StateCollector,
    StateDifference,
    StateItem,
)
from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.formatting import name_ranks
from ddpcheck.rules.rule import Location, Rule

RULE = Rule(
    code="DDP213",
    severity=Severity.ERROR,
    title="Ranks train in different states",
    summary="ranks train in different states: train/eval mode, frozen parameters, dropout, autocast, precision",
    location=Location.STEP,
)

_MOST_NAMES = 3
_MOST_ROWS = 32
_SEVERITY = {
    StateItem.MODE: Severity.ERROR,
    StateItem.FROZEN: Severity.ERROR,
    StateItem.SETTING: Severity.ERROR,
    StateItem.AUTOCAST: Severity.WARNING,
    StateItem.PRECISION: Severity.WARNING,
    StateItem.THREADS: Severity.NOTE,
    StateItem.HASH_SEED: Severity.NOTE,
}
_EFFECT = {
    StateItem.MODE: "Their gradients belong to different functions of the same weights (dropout, statistics of "
    "normalisation layers), which are averaged.",
    StateItem.FROZEN: "Ranks on which a parameter is frozen send zeros for it, so its mean gradient is too small.",
    StateItem.SETTING: "Their gradients belong to different functions of the same weights, which are averaged.",
    StateItem.AUTOCAST: "Ranks compute their gradients with different precision, which are averaged.",
    StateItem.PRECISION: "Ranks compute their gradients with different precision, which are averaged.",
    StateItem.THREADS: "Sums over another number of threads differ in their last bits.",
    StateItem.HASH_SEED: "What is built in the order of a set of texts is another on each of these ranks.",
}
_EFFECT_OF_KERNELS = "Their kernels differ, so gradients of the same batch would differ in their last bits."
_FIX = {
    StateItem.MODE: "Call model.train() on every rank directly before the training steps, also after an evaluation "
    "that returns early. If some layers are meant to be in eval mode, put them there on every rank.",
    StateItem.FROZEN: "Freeze and unfreeze parameters on every rank at the same step: decide on one rank and "
    "broadcast the decision, or reduce the metric first.",
    StateItem.SETTING: "Set it on every rank to the same value: compute it from the step or from a reduced metric.",
    StateItem.AUTOCAST: "Enter autocast on every rank with the same dtype: take the setting from one configuration "
    "and broadcast it.",
    StateItem.PRECISION: "Set precision and determinism alike on every rank, from one configuration.",
    StateItem.THREADS: "Nothing, unless runs must be reproducible bit for bit: then set OMP_NUM_THREADS alike.",
    StateItem.HASH_SEED: "Set PYTHONHASHSEED for all ranks or for none, and sort what is built from a set.",
}
_WORDS = {
    "float32_matmul_precision": "float32 matmul precision",
    "default_dtype": "default dtype",
    "deterministic_algorithms": "the setting of deterministic algorithms",
    "hash_seed": "the hash seed",
    "threads": "the number of threads",
}
# Arguments of loss functions with a value for each class.
_OF_CLASSES = ("weight", "pos_weight")
_SETTINGS_OF_LOSS = {"label_smoothing": "label smoothing", "weight": "weights of classes"}
_KERNELS = {"deterministic_algorithms", "cudnn.deterministic", "cudnn.benchmark", "cudnn.enabled"}


def find(context: RuleContext) -> list[Finding]:
    differences: list[Finding] = []
    of_process: set[StateItem] = set()
    for module in context.modules_with_forwards():
        for difference in _differences(context, module):
            if difference.kind in (
                StateItem.AUTOCAST,
                StateItem.PRECISION,
                StateItem.THREADS,
                StateItem.HASH_SEED,
            ):
                # A setting of the process: the same for all modules.
                if difference.kind in of_process:
                    continue
                of_process.add(difference.kind)
            differences.append(_finding(context, module, difference))
    of_loss = context.attempt.collector(LossFormCollector).setting_differences()
    return differences + [_of_loss(context, difference) for difference in of_loss]


def _of_loss(context: RuleContext, difference: LossSettingDifference) -> Finding:
    groups = difference.groups()
    ranks = outlier_ranks(groups)
    shown = groups[-1] if len(ranks) < sum(map(len, groups)) else ranks
    of_classes = difference.setting in _OF_CLASSES
    name = _SETTINGS_OF_LOSS.get(difference.setting, difference.setting)
    values = {
        name_ranks(members): _value(difference.values[members[0]])
        if of_classes
        else difference.values[members[0]]
        for members in groups
    }
    cause = f"{name} of the loss differs: {'; '.join(f'{value} on {who}' for who, value in values.items())}"
    where = next((difference.where[rank] for rank in shown if difference.where.get(rank)), "")
    return context.finding(
        RULE,
        f"From step {difference.step} on, {cause}. {_EFFECT[StateItem.SETTING]}",
        # Ranks may weight classes by their own data on purpose.
        severity=Severity.NOTE if of_classes else Severity.WARNING,
        step=difference.step,
        stage="backward",
        ranks=ranks,
        evidence={
            "settings": [{"loss": difference.function, "setting": difference.setting, "by_rank": values}],
            "count": 1,
            "steps": [difference.step, None],
            **({"backward_at": where} if where else {}),
        },
        cause=cause,
        fix="Create the loss with the same arguments on every rank, from one configuration.",
    )


def _value(digest: str) -> str:
    return f"weights {digest}" if digest else "none"


def _differences(context: RuleContext, module: ModuleKey) -> list[StateDifference]:
    attempt = context.attempt
    until = {
        number: max(attempt.steps(number), 1)
        for number, rank in attempt.of_module(module).items()
        if not any(fault.probe in STATE_PROBES for fault in rank.faults)
    }
    differences = attempt.collector(StateCollector).differences(module, until)
    # DDP104 reports parameters that were unfrozen after wrapping.
    unfrozen = {
        record.parameter
        for rank in attempt.of_module(module).values()
        for key, record in rank.structure
        if key == module and record.change == "unfrozen"
    }
    return [
        difference
        for difference in differences
        if difference.kind is not StateItem.FROZEN
        or not {key.rpartition(":")[0] for key in difference.values} <= unfrozen
    ]


def _finding(context: RuleContext, module: ModuleKey, difference: StateDifference) -> Finding:
    groups = difference.groups()
    ranks = outlier_ranks(groups)
    cause = _cause(difference, groups)
    shown = groups[-1] if len(ranks) < sum(map(len, groups)) else ranks
    where = next((difference.where[rank] for rank in shown if difference.where.get(rank)), "")
    frozen = [key.rpartition(":")[0] for key in difference.values]
    return context.finding(
        RULE,
        f"{_when(difference).capitalize()}, {cause}. {_effect(difference)}",
        severity=_SEVERITY[difference.kind],
        module=module,
        step=difference.first,
        stage="forward",
        parameter=frozen[0] if difference.kind is StateItem.FROZEN else None,
        ranks=ranks,
        evidence={
            "settings": _rows(difference),
            "count": len(difference.values),
            "steps": [difference.first, difference.last],
            **({"forward_at": where} if where else {}),
        },
        cause=cause,
        fix=_FIX[difference.kind],
    )


def _effect(difference: StateDifference) -> str:
    of_kernels = difference.kind is StateItem.PRECISION and difference.values.keys() <= _KERNELS
    return _EFFECT_OF_KERNELS if of_kernels else _EFFECT[difference.kind]


def _when(difference: StateDifference) -> str:
    if difference.last is None:
        return f"from step {difference.first} on"
    if difference.last == difference.first:
        return f"in step {difference.first}"
    return f"in steps {difference.first} to {difference.last}"


def _rows(difference: StateDifference) -> list[dict[str, Any]]:
    rows = []
    for key, by_rank in list(difference.values.items())[:_MOST_ROWS]:
        path, separator, attribute = key.rpartition(":")
        values: dict[str, list[int]] = {}
        for rank, value in by_rank.items():
            values.setdefault(str(value), []).append(rank)
        name = {"module": path or "(whole module)"} if separator else {}
        rows.append(
            {**name, "setting": attribute, "by_rank": {name_ranks(r): value for value, r in values.items()}}
        )
    return rows


def _cause(difference: StateDifference, groups: list[tuple[int, ...]]) -> str:
    keys = list(difference.values)
    paths = [key.rpartition(":")[0] for key in keys]
    if difference.kind is StateItem.MODE:
        key = ":training" if ":training" in difference.values else keys[0]
        what = "the whole module is" if key == ":training" else f"{_names(paths)} {_are(paths)}"
        ranks = [rank for rank, value in difference.values[key].items() if value is False]
        if not ranks:
            return f"{what} in training and in evaluation mode in different forwards"
        return f"{what} in evaluation mode on {name_ranks(ranks)} only"
    if difference.kind is StateItem.FROZEN:
        ranks = [rank for rank, value in difference.values[keys[0]].items() if value is False]
        return f"{_names(paths)} {_are(paths)} frozen on {name_ranks(ranks)} only"
    if difference.kind is StateItem.SETTING:
        by_attribute: dict[str, list[str]] = {}
        for key in keys:
            path, _, attribute = key.rpartition(":")
            by_attribute.setdefault(attribute, []).append(path)
        settings = [f"{attribute} of {_names(paths)}" for attribute, paths in sorted(by_attribute.items())]
        return f"settings of modules differ: {'; '.join(settings)}"
    if difference.kind is StateItem.AUTOCAST and "autocast" in difference.values:
        ranks = [rank for rank, value in difference.values["autocast"].items() if value is True]
        return f"autocast is on on {name_ranks(ranks)} only"
    name = _WORDS.get(keys[0], keys[0])
    values = "; ".join(
        f"{difference.values[keys[0]][ranks[0]]} on {name_ranks(ranks)}" for ranks in groups[:4]
    )
    return f"{name} differs: {values}"


def _names(paths: list[str]) -> str:
    more = f" and {len(paths) - _MOST_NAMES} more" if len(paths) > _MOST_NAMES else ""
    return ", ".join(paths[:_MOST_NAMES]) + more


def _are(paths: list[str]) -> str:
    return "is" if len(paths) == 1 else "are"
