"""Works out, once per module, where its parameters and gradients diverge and which cause explains it.

The causes come from the rules: a rule registers them with `RULE.explains_parameters` and `RULE.explains_gradients`.
They are tried by precedence, and the first that returns an explanation decides which rule reports the divergence.

Replicas on other nodes whose records are not in the run folder are compared by `node_findings`. With the records of all
ranks, the rules compare the ranks directly and report more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpcheck.analysis.aggregate.agreement import ComparisonKey, Disagreement, groups_of, outlier_ranks
from ddpcheck.analysis.aggregate.launch import Attempt, first_node_mismatch
from ddpcheck.analysis.aggregate.rank_data import ModuleKey, RankData
from ddpcheck.analysis.aggregate.step_evidence import SYNCED as SYNCED
from ddpcheck.analysis.evidence import of_disagreement
from ddpcheck.analysis.finding import Finding
from ddpcheck.records.kinds.digests import Stage, TensorKind
from ddpcheck.records.kinds.gradients import AppliedRecord
from ddpcheck.records.kinds.rank import NodeMismatchRecord
from ddpcheck.records.reasons import UnsyncedReason, WriteWindow, is_stored_as

if TYPE_CHECKING:
    from ddpcheck.analysis.context import RuleContext
    from ddpcheck.rules.rule import Rule

REASON_TEXT: dict[UnsyncedReason | WriteWindow, str] = {
    UnsyncedReason.NO_SYNC: "no_sync open",
    UnsyncedReason.FORWARD_IN_NO_SYNC: "forward inside no_sync, backward outside",
    UnsyncedReason.BYPASS: "wrapper bypassed",
    UnsyncedReason.TWO_FORWARDS: "two forwards before two backwards",
    UnsyncedReason.SECOND_BACKWARD: "second backward on one forward, or on a forward around the wrapper",
    UnsyncedReason.IN_BACKWARD: "step inside the backward, before DDP reduced the gradients",
    UnsyncedReason.FLAG_OFF: "require_backward_grad_sync off",
    UnsyncedReason.FLAG_SWITCHED: "require_backward_grad_sync off in the forward, on in the backward",
    WriteWindow.BEFORE_FORWARD: "before the forward",
    WriteWindow.IN_FORWARD: "inside the forward",
    WriteWindow.AFTER_BACKWARD: "between backward and step",
}
_BY_VALUE = {reason.value: text for reason, text in REASON_TEXT.items()}


def reason_text(stored: str) -> str:
    """The sentence for a stored value; text that is not such a value, as of earlier versions, stays as it is."""
    if is_stored_as(stored, UnsyncedReason.SECOND_BACKWARD):
        # Earlier versions stored a shorter sentence.
        return REASON_TEXT[UnsyncedReason.SECOND_BACKWARD]
    return _BY_VALUE.get(stored, stored)


@dataclass(frozen=True)
class RecreatedOptimizer:
    """Ranks that continued with another optimizer than the others, from `step` on."""

    ranks: tuple[int, ...]
    step: int
    # Whether replicas are known to differ at the last step.
    diverged: bool


def stepped_parameters(attempt: Attempt, module: ModuleKey, optimizer: int) -> dict[int, frozenset[int]]:
    """By rank, the indices of the module's parameters that its optimizer steps."""
    return {
        number: frozenset(index for group in record.groups for index in group if index >= 0)
        for number, rank in attempt.of_module(module).items()
        for (owner, key), record in rank.optimizers.items()
        if key == module and owner == optimizer
    }


def recreated_optimizer(attempt: Attempt, module: ModuleKey) -> RecreatedOptimizer | None:
    """None if all ranks stepped with the same optimizers, or not equally often."""
    steps = {
        number: {
            optimizer: count
            for (key, optimizer), count in rank.steps.items()
            if key == module and optimizer >= 0
        }
        for number, rank in attempt.of_module(module).items()
    }
    if len(steps) < 2 or not all(steps.values()):
        return None
    if len({max(counts.values()) for counts in steps.values()}) > 1:
        return None
    if len({tuple(sorted(counts)) for counts in steps.values()}) < 2:
        return None
    shared = set.intersection(*(set(counts) for counts in steps.values()))
    if not any(
        _takes_over(attempt.ranks[number], module, set(counts), shared) for number, counts in steps.items()
    ):
        return None
    # An optimizer that the rank steps beside another one replaces nothing.
    if any(
        max(counts[optimizer] for optimizer in set(counts) - shared)
        < max(counts[optimizer] for optimizer in set(counts) & shared)
        for counts in steps.values()
        if set(counts) - shared and set(counts) & shared
    ):
        return None
    before = [
        max(count for optimizer, count in counts.items() if optimizer in shared)
        for counts in steps.values()
        if set(counts) - shared and set(counts) & shared
    ]
    if not before:
        return None
    groups = groups_of({number: repr(sorted(counts)) for number, counts in steps.items()})
    lasts = [rank.last for rank in attempt.of_module(module).values() if rank.last is not None]
    comparable = len({last.step for last in lasts}) == 1 and all(
        last.stage == Stage.PARAMS.value for last in lasts
    )
    diverged = comparable and len({last.root for last in lasts}) > 1
    return RecreatedOptimizer(outlier_ranks([ranks for _, ranks in groups]), min(before), diverged)


def _takes_over(rank: RankData, module: ModuleKey, optimizers: set[int], shared: set[int]) -> bool:
    """Whether an optimizer that not all ranks have steps parameters of one that all ranks have."""
    held = {
        optimizer: {index for group in record.groups for index in group if index >= 0}
        for (optimizer, key), record in rank.optimizers.items()
        if key == module
    }
    earlier: set[int] = set().union(*(held.get(optimizer, set()) for optimizer in shared))
    # Where the parameters of an optimizer are not known, it may hold any.
    return any(optimizer not in held or earlier & held[optimizer] for optimizer in optimizers - shared)


class Precedence(IntEnum):
    """The order in which causes are tried: what happens earlier in a step, or is more exact, comes first.

    A new cause may use any integer between these.
    """

    # Of gradients.
    NOT_REDUCED = 10
    CHANGED_AFTER_REDUCTION = 20
    # Of parameters.
    UNKNOWN_TO_REDUCER = 110
    # Unscaling by different scales makes the gradients differ, so the scale comes before them.
    GRADIENT_SCALE = 120
    SKIPPED_STEP = 130
    # The explanation of the gradients, if they diverged no later than the parameters.
    GRADIENTS = 140
    WRITTEN_OUTSIDE_STEP = 150
    NO_OPTIMIZER = 160
    FROZEN_PARAMETERS = 170
    HYPERPARAMETERS = 180
    PARAMETER_GROUPS = 190
    OPTIMIZER_STATE = 200
    LOADED_STATE = 210
    # The general case of either.
    UNEXPLAINED = 1000


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What a cause knows about a divergence."""

    cause: str = ""
    # The disagreement that shows the cause, if it is not the divergence itself.
    root: Disagreement | None = None
    evidence: dict[str, Any] = field(default_factory=dict)
    parameter: str | None = None
    # The ranks at fault; empty: the outliers of the divergence.
    ranks: tuple[int, ...] = ()
    # What to do; empty: what the rule says in general.
    fix: str = ""


@dataclass(frozen=True, kw_only=True)
class Divergence(Explanation):
    """The first divergence of a module's parameters or gradients, and the code of the rule that explains it."""

    code: str
    first: Disagreement
    # The last step before it at which ranks are known to have agreed; -1: after wrapping.
    agreed_until: int = -1

    @property
    def step(self) -> int:
        return self.first.key.step

    @property
    def when(self) -> str:
        """The step, or the range of steps if those before it were not compared."""
        earliest = self.agreed_until + 1
        return (
            f"at step {self.step}" if earliest >= self.step else f"between steps {earliest} and {self.step}"
        )

    def compared_evidence(self) -> dict[str, Any]:
        """Evidence of when it happened; empty if every step was compared."""
        return {"last_equal_step": self.agreed_until} if self.agreed_until + 1 < self.step else {}


@dataclass(frozen=True)
class ModuleDivergence:
    """The divergence of one module. Both are None if its replicas stay identical."""

    parameters: Divergence | None = None
    # None as well if the parameters diverged before, for another reason.
    gradients: Divergence | None = None
    # The first divergence of gradients that were compared, if that was after the parameters diverged.
    later_gradients: Divergence | None = None


Explain = Callable[[Attempt, ModuleKey, Disagreement], Explanation | None]


@dataclass(frozen=True)
class Cause:
    """A function that recognises one cause of divergence, and the code of the rule that registered it."""

    code: str
    precedence: int
    explain: Explain


def explain_module(attempt: Attempt, module: ModuleKey, rules: Sequence[Rule]) -> ModuleDivergence:
    """Find the first divergence of `module` and explain it with the causes of `rules`."""
    gradients = _gradients(attempt, module, [cause for rule in rules for cause in rule.gradient_causes])
    parameters = _parameters(
        attempt, module, [cause for rule in rules for cause in rule.parameter_causes], gradients
    )
    later = None
    if gradients is not None and parameters is not None and parameters.code != gradients.code:
        if not gradients.first.digested:
            gradients = None
        elif parameters.step <= gradients.step:
            gradients, later = None, gradients
    return ModuleDivergence(parameters, gradients, later)


def same_parameter_names(attempt: Attempt, module: ModuleKey) -> bool:
    """Whether all ranks listed the same parameters in the same order when they wrapped the module."""
    ranks = attempt.of_module(module).values()
    return len({tuple(row[0] for row in rank.as_wrapped[module].parameters) for rank in ranks}) <= 1


def gradient_evidence(attempt: Attempt, divergence: Divergence, folder: Path) -> dict[str, Any]:
    """The evidence of a divergence of gradients.

    Only ranks that noticed it themselves wrote the digest of each gradient. If a rank was too far ahead, the
    parameters that differ after the same step are used instead of the gradients.
    """
    key = divergence.first.key
    after = attempt.agreement.stats_of(key.module, Stage.PARAMS, TensorKind.PARAMETERS).first
    if not divergence.first.digested and after is not None:
        return {
            **divergence.evidence,
            **of_disagreement(attempt, after, folder),
            "gradients_compared": False,
            "parameters_differ_after_step": after.key.step,
        }
    evidence = {**divergence.evidence, **of_disagreement(attempt, divergence.first, folder)}
    if not evidence["parameters"]["names"] and after is not None and after.key.step == key.step:
        evidence["parameters"] = of_disagreement(attempt, after, folder)["parameters"]
    return evidence


def _gradients(attempt: Attempt, module: ModuleKey, causes: Iterable[Cause]) -> Divergence | None:
    """The first step at which ranks applied different gradients."""
    first = attempt.agreement.stats_of(module, Stage.APPLIED, TensorKind.GRADIENTS).first
    unreduced = _unreduced_window(attempt, module)
    if unreduced is not None and (first is None or unreduced.key.step < first.key.step):
        first = unreduced
    if first is None or attempt.uses_local_sgd(module) or _structure_changed(attempt, module, first):
        return None
    # Inside join(), a rank without data still steps its share of a sharded optimizer, and sends the result around.
    params = attempt.agreement.stats_of(module, Stage.PARAMS, TensorKind.PARAMETERS)
    if attempt.joined(module) and params.compared and params.first is None:
        return None
    # Optimizers that hold different parameters apply different sets of gradients.
    if len(set(stepped_parameters(attempt, module, first.key.optimizer).values())) > 1:
        return None
    return _first_explanation(attempt, module, first, causes)


def _unreduced_window(attempt: Attempt, module: ModuleKey) -> Disagreement | None:
    """The first step with gradients that DDP did not reduce, among steps without a digest of applied gradients.

    It counts only if the parameters, equal before it, differ when they are compared next. A job that reduces gradients
    itself always has such steps.
    """
    diverged = attempt.agreement.stats_of(module, Stage.PARAMS, TensorKind.PARAMETERS).first
    if diverged is None or module in attempt.agreement.reduced_by_job:
        return None
    for window in undigested_windows(attempt, diverged.key):
        records = window.digests.values()
        if any(isinstance(record, AppliedRecord) and record.last != SYNCED for record in records):
            return window
    return None


def undigested_windows(attempt: Attempt, diverged: ComparisonKey) -> list[Disagreement]:
    """Applied gradients without a digest, of the steps in which the parameters diverged. Their roots are empty."""
    params = attempt.agreement.stats_of(diverged.module, Stage.PARAMS, TensorKind.PARAMETERS)
    after = params.agreed_before(diverged)
    windows = attempt.agreement.windows.between(diverged.module, diverged.optimizer, after, diverged.step)
    return [
        Disagreement(
            diverged._replace(stage=Stage.APPLIED.value, of=TensorKind.GRADIENTS.value, step=step), records
        )
        for step, records in windows
    ]


def _structure_changed(attempt: Attempt, module: ModuleKey, first: Disagreement) -> bool:
    """Gradients of parameters that the reducer does not know differ between ranks as expected."""
    return any(
        key == module and record.step <= first.key.step
        for rank in attempt.of_module(module).values()
        for key, record in rank.structure
    )


def _parameters(
    attempt: Attempt, module: ModuleKey, causes: Iterable[Cause], gradients: Divergence | None
) -> Divergence | None:
    """The first step after which parameters differ, unless they differed from the wrapping on."""
    first = attempt.agreement.stats_of(module, Stage.PARAMS, TensorKind.PARAMETERS).first
    if first is None or attempt.uses_local_sgd(module) or not same_parameter_names(attempt, module):
        return None
    if attempt.agreement.stats_of(module, Stage.INIT_AFTER, TensorKind.PARAMETERS).first is not None:
        return None
    by_gradients = [Cause(gradients.code, Precedence.GRADIENTS, _follows(gradients))] if gradients else []
    return _first_explanation(attempt, module, first, [*causes, *by_gradients])


def _follows(gradients: Divergence) -> Explain:
    def explain(attempt: Attempt, module: ModuleKey, first: Disagreement) -> Explanation | None:
        """The gradients diverged no later, and no write made the parameters diverge before them."""
        rewritten = attempt.agreement.rewritten.get(module)
        if gradients.step > first.key.step:
            return None
        if rewritten is not None and rewritten.key.step < gradients.step:
            return None
        return Explanation(cause=gradients.cause)

    return explain


def _first_explanation(
    attempt: Attempt, module: ModuleKey, first: Disagreement, causes: Iterable[Cause]
) -> Divergence | None:
    for cause in sorted(causes, key=lambda cause: cause.precedence):
        explanation = cause.explain(attempt, module, first)
        if explanation is not None:
            return Divergence(
                code=cause.code, first=first, agreed_until=_agreed_until(attempt, first), **vars(explanation)
            )
    return None


def _agreed_until(attempt: Attempt, first: Disagreement) -> int:
    """Of parameters: equal parameters show that earlier steps applied equal gradients."""
    params = attempt.agreement.stats_of(first.key.module, Stage.PARAMS, TensorKind.PARAMETERS)
    return params.agreed_before(first.key)


# Stages at which nodes compare their replicas.
_COMPARED = (Stage.INIT_AFTER.value, Stage.BUFFERS.value, Stage.PARAMS.value)


def node_findings(context: RuleContext, rule: Rule, stage: Stage) -> list[Finding]:
    """The mismatches between nodes whose first one is at `stage`, at most one per module."""
    findings = []
    for module in context.modules():
        absent = set(module[0]) - context.attempt.ranks.keys()
        mismatch = first_node_mismatch(context.attempt, module) if absent else None
        if mismatch is None or mismatch[1].stage != stage.value:
            continue
        if not _differs_here(context, module, mismatch[1].step):
            findings.append(_finding(context, rule, module, *mismatch))
    return findings


def _differs_here(context: RuleContext, module: ModuleKey, step: int) -> bool:
    """Whether ranks of this folder differ from each other by then: then the rules report that."""
    comparisons = context.attempt.agreement.stats
    firsts = [
        stats.first for (key, stage, _), stats in comparisons.items() if key == module and stage in _COMPARED
    ]
    return any(first is not None and first.key.step <= step for first in firsts)


def _finding(
    context: RuleContext, rule: Rule, module: ModuleKey, rank: int, record: NodeMismatchRecord
) -> Finding:
    host = context.attempt.ranks[rank].header.host
    kind = "buffers" if record.of == TensorKind.BUFFERS.value else "parameters"
    return context.finding(
        rule,
        f"{_when(record)}, the {kind} of rank {rank} on {host} and rank {record.other_rank} on {record.other_host} "
        f"differ. The records of {record.other_host} are not in this run folder: merge the run folders to see "
        f"which {kind} differ and why.",
        module=module,
        step=record.step,
        stage=record.stage,
        ranks=tuple(sorted({rank, record.other_rank})),
        evidence={
            "hosts": {str(rank): host, str(record.other_rank): record.other_host},
            "digests": {str(rank): record.root, str(record.other_rank): record.other_root},
            "gradients_differed_before": _gradients_differed(context, module, record),
        },
        cause=_cause(context, module, record),
        fix="Copy the run folders of all nodes to one machine and run 'ddpcheck merge FOLDER...' on them.",
    )


def _when(record: NodeMismatchRecord) -> str:
    if record.stage == Stage.INIT_AFTER.value:
        return "After wrapping"
    if record.stage == Stage.BUFFERS.value:
        return f"After synchronisation {record.step} of the buffers"
    return f"After step {record.step}"


def _gradients_differed(context: RuleContext, module: ModuleKey, record: NodeMismatchRecord) -> bool:
    return any(
        other.stage == Stage.APPLIED.value and key == module and other.step <= record.step
        for rank in context.attempt.ranks.values()
        for key, other in rank.node_mismatches
    )


def _cause(context: RuleContext, module: ModuleKey, record: NodeMismatchRecord) -> str:
    if record.stage != Stage.PARAMS.value:
        return "replicas on different nodes were not synchronised"
    if _gradients_differed(context, module, record):
        return "the gradients that the optimizer applied already differed between nodes"
    return "the update was not the same on every node"
