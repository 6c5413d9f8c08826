"""DDP215: parameters never change although optimizers step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from ddpcheck.analysis.aggregate.rank_data import ModuleKey, RankData, is_unwrapped
from ddpcheck.analysis.collectors.learning import Changes, LearningCollector
from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.step_coverage.collector import StepCoverageCollector
from ddpcheck.records.kinds.coverage import Parallelism
from ddpcheck.records.kinds.digests import Stage
from ddpcheck.records.kinds.modules import ModuleRecord, ModuleRole
from ddpcheck.rules.rule import Location, Need, Rule

RULE = Rule(
    code="DDP215",
    severity=Severity.WARNING,
    title="Parameters never change",
    summary="parameters never change although optimizers step: the optimizer has other ones, or no gradient arrives",
    needs=(Need.PARAMETERS,),
    location=Location.STEP,
)

# Fewer steps may be a warm-up.
FEWEST_STEPS = 4
# A learning rate of zero for a few steps is a warm-up too.
_FEWEST_STEPS_AT_ZERO = 10
# Unused heads and rarely used parts are smaller than this share of what is trained.
_LEAST_SHARE = 0.5
_MOST_NAMES = 3
_MOST_LISTED = 20


def find(context: RuleContext) -> list[Finding]:
    learning = context.attempt.collector(LearningCollector).modules
    findings = _nothing_changes(context, learning)
    for module in context.modules():
        changes = learning.get(module)
        rank = context.attempt.ranks.get(module[0][0])
        if changes is None or rank is None or module not in rank.latest or is_unwrapped(module):
            continue
        finding = _other_parameters(context, module, rank, changes, learning)
        finding = finding or _rate_of_zero(context, module, rank, changes)
        finding = finding or _never_changed(context, module, rank, changes)
        if finding is not None:
            findings.append(finding)
    return findings


def _nothing_changes(context: RuleContext, learning: dict[ModuleKey, Changes]) -> list[Finding]:
    """A job without DDP of which no optimizer has ever changed anything: they hold parameters that are not used."""
    stepped: list[tuple[ModuleKey, RankData, Changes]] = []
    # Also what is no replica: each rank trains nothing then.
    for module in context.attempt.modules():
        changes, rank = learning.get(module), context.attempt.ranks.get(module[0][0])
        if changes is None or rank is None or module not in rank.latest:
            return []
        if rank.latest[module].role != ModuleRole.STEPPED.value:
            return []
        owned = _owned(rank, module, changes.steps, FEWEST_STEPS)
        if changes.lost or not changes.first or changes.changed or not owned >= _trainable(rank, module):
            return []
        stepped.append((module, rank, changes))
    if not stepped:
        return []
    module, rank, changes = stepped[0]
    description = next(record for (_, key), record in rank.optimizers.items() if key == module)
    training = context.attempt.collector(StepCoverageCollector).training.get(rank.number)
    by_fsdp = training is not None and {Parallelism.FSDP.value, Parallelism.FSDP2.value} & set(training.seen)
    count = sum(len(each.first) for _, _, each in stepped)
    steps = max(changes.steps.values())
    cause = (
        f"{description.name} was made before the model was sharded: FSDP replaced the parameters by others, and the "
        "optimizer holds those that were there before"
        if by_fsdp
        else f"{description.name} holds parameters that the loss does not depend on, or whose gradients are zero"
    )
    return [
        context.finding(
            RULE,
            f"Nothing is trained: {count} parameters that optimizers step have never changed in {steps} compared "
            f"steps. The likely cause: {cause}.",
            module=module,
            step=0,
            stage=Stage.PARAMS.value,
            ranks=module[0],
            evidence={"count": count, "steps": steps, "optimizer_at": description.where},
            cause=cause,
            fix="Make the optimizer from model.parameters() after the model was wrapped, sharded, copied or converted.",
        )
    ]


def _trainable(rank: RankData, module: ModuleKey) -> set[int]:
    """Indices of the parameters that required gradients at the wrapping and still do."""
    record, wrapped = rank.latest[module], rank.as_wrapped[module]
    if len(record.parameters) != len(wrapped.parameters):
        return set()
    pairs = enumerate(zip(record.parameters, wrapped.parameters, strict=True))
    return {index for index, (now, before) in pairs if now[3] and before[3]}


def _owned(rank: RankData, module: ModuleKey, steps: Counter[int], fewest: int) -> set[int]:
    """Indices of the parameters that an optimizer steps, often enough and with a learning rate that is not zero."""
    return {
        index
        for (optimizer, key), record in rank.optimizers.items()
        if key == module and steps[optimizer] >= fewest
        for number, group in enumerate(record.groups)
        if fewest == 0 or _effective_steps(rank, optimizer, number, steps[optimizer]) >= fewest
        for index in group
        if index >= 0
    }


def _effective_steps(rank: RankData, optimizer: int, group: int, steps: int) -> int:
    """Steps of a group with a learning rate other than zero. `steps` where the optimizer has none."""
    name = f"{group}.lr"
    first = rank.hyper_before.get(optimizer, {}).get(name)
    changes = [(0, first)] if first is not None else []
    changes += [
        (record.step, record.changed[name])
        for record in rank.hyper
        if record.optimizer == optimizer and name in record.changed
    ]
    if not changes:
        return steps
    ends = [*(step for step, _ in changes[1:]), max(steps, changes[-1][0])]
    return sum(end - step for (step, value), end in zip(changes, ends, strict=True) if value != 0)


def _rate_of_zero(
    context: RuleContext, module: ModuleKey, rank: RankData, changes: Changes
) -> Finding | None:
    """The learning rate of every group is zero at every step. A warm-up from zero has a few such steps."""
    stepped = _owned(rank, module, changes.steps, 0) & _trainable(rank, module)
    if not stepped or not stepped <= changes.unchanged or _owned(rank, module, changes.steps, 1):
        return None
    steps = max(changes.steps.values(), default=0)
    if steps < _FEWEST_STEPS_AT_ZERO:
        return None
    names = [str(rank.latest[module].parameters[index][0]) for index in sorted(stepped)]
    cause = "the learning rate is zero at every step"
    return context.finding(
        RULE,
        f"None of the {len(names)} parameters that optimizers step has changed in {steps} compared steps: {cause}.",
        module=module,
        stage=Stage.PARAMS.value,
        parameter=names[0],
        ranks=module[0],
        evidence={"parameters": names[:_MOST_LISTED], "count": len(names), "steps": steps},
        cause=cause,
        fix="Look at the schedule: a division of integers, a warm-up that counts epochs instead of steps, or a "
        "schedule that has come to its end.",
    )


def _never_changed(
    context: RuleContext, module: ModuleKey, rank: RankData, changes: Changes
) -> Finding | None:
    """Most of what the optimizers of this module step has never changed."""
    trained = _trainable(rank, module) & _owned(rank, module, changes.steps, FEWEST_STEPS)
    never = sorted(trained & changes.unchanged)
    record = rank.latest[module]
    if not never or _size(record, never) < _LEAST_SHARE * _size(record, trained):
        return None
    names = [str(record.parameters[index][0]) for index in never]
    without = changes.backwards > 0 and set(never) <= changes.absent
    steps = max(changes.steps.values())
    if without:
        cause = f"no gradient reaches {_shown(names)}"
        fix = (
            "Find where the path from the loss to them is cut: a forward under torch.no_grad() or "
            "inference_mode(), detach(), .data, .item(), or an output that the loss does not use. Freeze them "
            "(requires_grad_(False)) if they are not meant to be trained."
        )
    else:
        cause = f"steps leave {_shown(names)} unchanged to the bit: zero gradients, or updates below the precision"
        fix = (
            "Look at the size of gradients and updates. In bfloat16 or float16, small updates are rounded away: keep "
            "the parameters in float32."
        )
    return context.finding(
        RULE,
        f"{len(never)} of {len(trained)} parameters that optimizers step have never changed in {steps} compared "
        f"steps: {cause}.",
        # Gradients that are zero may be right, as in a phase that waits for data.
        severity=Severity.WARNING if without else Severity.NOTE,
        module=module,
        stage=Stage.PARAMS.value,
        parameter=names[0],
        ranks=module[0],
        evidence={
            "parameters": names[:_MOST_LISTED],
            "count": len(never),
            "of": len(trained),
            "steps": steps,
            "without_gradient": without,
        },
        cause=cause,
        fix=fix,
    )


def _other_parameters(
    context: RuleContext,
    module: ModuleKey,
    rank: RankData,
    changes: Changes,
    learning: dict[ModuleKey, Changes],
) -> Finding | None:
    """An optimizer steps parameters that never change, and none steps those of the module that look the same."""
    if changes.backwards < FEWEST_STEPS:
        return None
    missing = sorted(
        (_trainable(rank, module) & changes.unchanged)
        - _owned(rank, module, changes.steps, 0)
        - changes.absent
    )
    record = rank.latest[module]
    shapes = _shapes(record, missing)
    for (optimizer, other), description in rank.optimizers.items():
        known = learning.get(other)
        if not missing or not is_unwrapped(other) or known is None or other not in rank.latest:
            continue
        orphans = rank.latest[other]
        stepped = _owned(rank, other, known.steps, FEWEST_STEPS)
        if not stepped or not stepped <= known.unchanged or _shapes(orphans, sorted(stepped)) - shapes:
            continue
        names = [str(record.parameters[index][0]) for index in missing]
        cause = (
            f"{description.name} steps {len(stepped)} parameters that are in no module that runs, and none of "
            f"{_shown(names)}"
        )
        return context.finding(
            RULE,
            f"{len(names)} parameters receive gradients and have never changed: {cause}. In "
            f"{known.steps[optimizer]} compared steps, what it steps did not change either.",
            module=module,
            stage=Stage.PARAMS.value,
            parameter=names[0],
            ranks=module[0],
            evidence={
                "parameters": names[:_MOST_LISTED],
                "count": len(names),
                "stepped": [str(orphans.parameters[index][0]) for index in sorted(stepped)][:_MOST_LISTED],
                "steps": known.steps[optimizer],
                **({"optimizer_at": description.where} if description.where else {}),
            },
            cause=cause,
            fix="Make the optimizer from the parameters of the module that is trained, after the last copy, "
            "conversion or replacement of it: torch.optim.AdamW(ddp_model.parameters()).",
        )
    return None


def _shapes(record: ModuleRecord, indices: Iterable[int]) -> Counter[tuple[int, ...]]:
    return Counter(tuple(record.parameters[index][2]) for index in indices)


def _size(record: ModuleRecord, indices: Iterable[int]) -> int:
    return sum(math.prod(record.parameters[index][2]) for index in indices)


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
