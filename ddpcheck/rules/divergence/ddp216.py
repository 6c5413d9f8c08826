"""DDP216: training does not continue from what the checkpoint held."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ddpcheck.analysis.aggregate.rank_data import ModuleKey
from ddpcheck.analysis.collectors.restore import RestoreCollector
from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.records.kinds.checkpoints import (
    OptimizerRestoreRecord,
    OptimizerState,
    RestoreRecord,
    ResumedDataRecord,
    StateKind,
)
from ddpcheck.rules.rule import Location, Rule, first_sentence

RULE = Rule(
    code="DDP216",
    severity=Severity.WARNING,
    title="A checkpoint was not restored as it was saved",
    summary="what was loaded from a checkpoint is not what the job trains with",
    live=True,
    location=Location.WRAPPING,
    headline=first_sentence,
)

# Weights that have nothing to do with those of the file: noise on loaded weights leaves a correlation.
UNRELATED = 0.2
_MOST_NAMES = 3


class Problem(NamedTuple):
    """What is wrong with one restore on one rank."""

    message: str
    cause: str
    fix: str
    severity: Severity = Severity.WARNING
    parameter: str | None = None


def find(context: RuleContext) -> list[Finding]:
    restores = context.attempt.collector(RestoreCollector)
    findings = []
    for module in context.attempt.modules():
        of_rank = restores.modules.get(module, {})
        for judge in (_misnamed, _overwritten, _swapped, _left_out):
            findings += _findings(context, module, of_rank, judge)
        optimizers = restores.optimizers.get(module, {})
        # A state that only some ranks loaded makes replicas diverge: DDP206 reports it.
        some_loaded = any(
            record.state == OptimizerState.LOADED.value
            for records in optimizers.values()
            for record in records
        )
        for judge_state in (_cast, _rounded, _fresh, _left_in_file) if some_loaded else (_not_restored,):
            findings += _findings(context, module, optimizers, judge_state)
        data = {rank: [record] for rank, record in restores.data.get(module, {}).items()}
        findings += _findings(context, module, data, _repeated_data)
    return findings


def _findings(
    context: RuleContext,
    module: ModuleKey,
    records: Mapping[int, Sequence[RestoreRecord | OptimizerRestoreRecord | ResumedDataRecord]],
    judge: Callable[..., Problem | None],
) -> list[Finding]:
    """One finding for all ranks with the problem, from the first record that has it."""
    with_problem = {
        rank: (record, problem)
        for rank, of_rank in sorted(records.items())
        for record in reversed(of_rank)
        if (problem := judge(context, module, rank, record)) is not None
    }
    if not with_problem:
        return []
    record, problem = with_problem[min(with_problem)]
    evidence = {
        name: value
        for name, value in vars(record).items()
        if value not in (None, [], "", 0) and name not in ("module", "optimizer", "step")
    }
    return [
        context.finding(
            RULE,
            problem.message,
            severity=problem.severity,
            module=module,
            step=record.step,
            parameter=problem.parameter,
            ranks=tuple(with_problem),
            evidence=evidence,
            cause=problem.cause,
            fix=problem.fix,
        )
    ]


def _misnamed(context: RuleContext, module: ModuleKey, rank: int, record: RestoreRecord) -> Problem | None:
    if not record.misnamed:
        return None
    most = 2 * record.misnamed >= record.tensors
    resumed = context.attempt.collector(RestoreCollector).resumed(module, rank, record.file)
    if not most and not resumed:
        return None
    stored, held = record.misnamed_example
    return Problem(
        f"{record.misnamed} of {record.tensors} tensors were not loaded from {_file(record)}: the file has "
        f"{stored} where the module has {held}, and training began with other values.",
        f"names differ by a prefix ({stored} in the file, {held} in the module), and load_state_dict(strict=False) "
        "leaves out names that do not match",
        "Load the state dict of the same object that was saved (the wrapped module or DDP's `.module`), or remove the "
        "prefix from the names. Load with strict=True, or check the missing and unexpected names that "
        "load_state_dict returns.",
        Severity.ERROR if most else Severity.WARNING,
        held,
    )


def _overwritten(context: RuleContext, module: ModuleKey, rank: int, record: RestoreRecord) -> Problem | None:
    unrelated = record.correlation is not None and abs(record.correlation) < UNRELATED
    if not unrelated or 2 * record.changed <= record.tensors:
        return None
    by_rank = context.attempt.collector(RestoreCollector).modules.get(module, {})
    if any(2 * each.equal > each.tensors for records in by_rank.values() for each in records):
        # Replicas differ, or a later load has replaced this one.
        return None
    first = min(module[0])
    broadcast = first not in by_rank
    cause = (
        f"rank {first} did not load the file, and DDP's constructor copied its weights to the other ranks"
        if broadcast
        else "the weights were written after the file was loaded: initialised again, or loaded from another source"
    )
    return Problem(
        f"{record.changed} of {record.tensors} tensors were loaded from {_file(record)}, and training began with "
        f"other values, which have nothing to do with those of the file.",
        cause,
        "Load the checkpoint on rank 0, or on every rank, before wrapping."
        if broadcast
        else "Load the checkpoint last, after every initialisation of the model.",
        parameter=record.changed_example,
    )


def _swapped(context: RuleContext, module: ModuleKey, rank: int, record: RestoreRecord) -> Problem | None:
    # Layers may be copied from others on purpose, but not in a job that continues.
    if not record.swapped or not context.attempt.collector(RestoreCollector).resumed(
        module, rank, record.file
    ):
        return None
    stored, held = record.swapped_examples[0]
    return Problem(
        f"{record.swapped} tensors were restored under another name from {_file(record)}: {held} has the values of "
        f"{stored}, and the file has other values for it.",
        "the names of the state dict were mapped to each other in another way than they were saved",
        "Load the state dict by its own names, without renaming or by one prefix for all of them.",
        parameter=held,
    )


def _left_out(context: RuleContext, module: ModuleKey, rank: int, record: RestoreRecord) -> Problem | None:
    # A job that begins anew with these weights may leave out what it likes.
    if not record.left or not context.attempt.collector(RestoreCollector).resumed(module, rank, record.file):
        return None
    names = ", ".join(record.left_examples[:_MOST_NAMES])
    more = f" and {record.left - _MOST_NAMES} more" if record.left > _MOST_NAMES else ""
    return Problem(
        f"{record.left} of {record.tensors} tensors were not loaded from {_file(record)}, which has other values for "
        f"them: {names}{more}. The optimizer's state was restored, so the job continues without a part of the model.",
        "the state dict that was loaded lacks them: it was filtered, or made from parameters() without the buffers",
        "Load the whole state dict, with strict=True.",
        parameter=record.left_examples[0],
    )


def _not_restored(
    context: RuleContext, module: ModuleKey, rank: int, record: OptimizerRestoreRecord
) -> Problem | None:
    if record.state == OptimizerState.ELSEWHERE.value:
        return Problem(
            f"The optimizer's state was loaded into an optimizer that never stepped; {record.name}, which trains "
            f"these parameters, began without a state ({record.entries} parameters had one in the file).",
            "the optimizer was created again after its state was loaded",
            "Load the state into the optimizer that trains, after the model is wrapped and the optimizer is made.",
        )
    if record.state == OptimizerState.NOT_REQUESTED.value:
        return Problem(
            f"The optimizer's state was not loaded from {_file(record)}: the state dict that was passed to the load "
            f"had no state to fill, and the checkpoint has one for {record.entries} parameters. {record.name} began "
            "without a state.",
            "torch.distributed.checkpoint loads what the passed state dict contains, and that of an optimizer which "
            "has not stepped is empty",
            "Pass the state dict of torch.distributed.checkpoint.state_dict.get_optimizer_state_dict, which creates "
            "the state first, and set_optimizer_state_dict after the load.",
        )
    if record.state != OptimizerState.EMPTY.value:
        return None
    resumed = [kind for kind in record.resumed if kind in (StateKind.SCHEDULER.value, StateKind.SCALER.value)]
    certain = bool(resumed) and record.same_settings
    return Problem(
        f"The optimizer's state was not loaded from {_file(record)}, although the model"
        f"{''.join(f' and the {kind}' for kind in resumed)} came from it: {record.name} began without the state that "
        f"the file has for {record.entries} parameters."
        + ("" if certain else " This is correct if the job begins a new training with these weights."),
        "load_state_dict was not called on the optimizer",
        "To continue the training, load the optimizer's state too.",
        Severity.WARNING if certain else Severity.NOTE,
    )


def _cast(
    context: RuleContext, module: ModuleKey, rank: int, record: OptimizerRestoreRecord
) -> Problem | None:
    if not record.cast or record.weights_cast:
        return None
    name, stored, held = record.cast_example
    return Problem(
        f"Loading converted the optimizer's {name} of {record.cast} parameters from {stored} to {held}.",
        f"Optimizer.load_state_dict converts states to the dtype of their parameters ({held}); they were saved as "
        f"{stored}",
        f"Restore the states in {stored} after load_state_dict, by a hook of "
        "register_load_state_dict_post_hook, or keep parameters and states in one dtype.",
    )


def _rounded(
    context: RuleContext, module: ModuleKey, rank: int, record: OptimizerRestoreRecord
) -> Problem | None:
    if not record.rounded:
        return None
    weights, states = record.rounded
    return Problem(
        f"The weights were restored from {weights}, while the optimizer's states in the same file are {states}: the "
        "job continues with rounded weights.",
        f"the checkpoint was saved with weights converted to {weights}",
        "Save the weights of a checkpoint in the dtype in which they are trained, and a converted copy apart.",
    )


def _fresh(
    context: RuleContext, module: ModuleKey, rank: int, record: OptimizerRestoreRecord
) -> Problem | None:
    if not record.fresh or record.fresh > record.found:
        return None
    return Problem(
        f"{record.fresh} parameters have a restored optimizer state, but values that no loaded file has, the first "
        f"of them {record.fresh_examples[0]}; {record.found} others were restored with their values.",
        "the parameters are in the optimizer, but not in the state dict that was saved or loaded",
        "Save and load every module whose parameters the optimizer steps: heads, loss weights, embeddings.",
        parameter=record.fresh_examples[0],
    )


def _left_in_file(
    context: RuleContext, module: ModuleKey, rank: int, record: OptimizerRestoreRecord
) -> Problem | None:
    if not record.not_restored:
        return None
    parts = " and ".join(_PARTS[part] for part in record.not_restored)
    return Problem(
        f"Model and optimizer were restored from {_file(record)}, but not {parts}, which the file has too. "
        "This is correct if the job begins a new schedule with this state.",
        f"no load_state_dict was called for {parts}"
        if StateKind.RNG.value not in record.not_restored
        else f"{parts} stayed as the program made them",
        "To continue the training as it was, restore every part of the checkpoint.",
        Severity.NOTE,
    )


_PARTS = {
    StateKind.SCHEDULER.value: "the learning rate schedule",
    StateKind.SCALER.value: "the gradient scaler",
    StateKind.RNG.value: "the random generators",
}


def _repeated_data(
    context: RuleContext, module: ModuleKey, rank: int, record: ResumedDataRecord
) -> Problem | None:
    optimizers = context.attempt.collector(RestoreCollector).optimizers.get(module, {}).get(rank, [])
    if not any(each.state == OptimizerState.LOADED.value for each in optimizers):
        return None
    if record.left_out:
        return Problem(
            f"An epoch was in progress when {_file(record)} was saved, and the job began with the next one: "
            f"{record.left_out} batches of each rank are never used in this epoch.",
            "the position within the epoch was not restored",
            "Continue the epoch and skip the batches that were used, save at the end of an epoch, or use a loader that "
            "saves its position.",
            Severity.NOTE,
        )
    if record.repeats < 0:
        return None
    if record.in_progress and record.passed_over:
        wrong = record.passed_over - record.saved_batches
        return Problem(
            f"The job skipped {record.passed_over} batches to continue the epoch that was in progress when "
            f"{_file(record)} was saved, and {record.saved_batches} had been used: {abs(wrong)} batches of each rank "
            "are " + ("never used." if wrong > 0 else "used twice."),
            "the position within the epoch was restored wrongly: batches were counted in another unit (steps, "
            "micro-batches, batches of all ranks) or from another start",
            "Save the number of batches that this rank's loader has returned in this epoch, and skip that many.",
        )
    if record.in_progress:
        return Problem(
            f"The epoch that was in progress when {_file(record)} was saved began again: {record.saved_batches} "
            "batches of each rank are used twice.",
            "the position within the epoch was not restored",
            "Skip the batches that were already used, save at the end of an epoch, or use a loader that saves its "
            "position.",
            Severity.NOTE,
        )
    return Problem(
        f"After {_file(record)} was loaded, the data came in the order of pass {record.repeats} again: "
        f"{record.saved_passes} passes were finished when it was saved.",
        "the number of the epoch was not restored, so the sampler shuffles as it did at the beginning",
        "Save the number of the epoch, and continue to call sampler.set_epoch from there.",
    )


def _file(record: RestoreRecord | OptimizerRestoreRecord | ResumedDataRecord) -> str:
    return record.file.rpartition("/")[2] or "the checkpoint"
