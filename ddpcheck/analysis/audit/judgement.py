"""Which rank the votes of all rounds name, and whether the module gives the same gradient twice at all."""

from __future__ import annotations

from dataclasses import dataclass

from ddpcheck.analysis.audit.collector import AuditStats
from ddpcheck.analysis.audit.vote import Difference, Round
from ddpcheck.records.reasons import AuditSkip

# Pairs of equal results of the same module, by other ranks: they show that it gives the same gradient twice.
FEWEST_WITNESSES = 2
# Above this share of rounds without an explanation, the module itself is not reproducible.
_LARGEST_UNEXPLAINED = 0.1

# Why micro-batches were not audited, by value of `AuditSkip`.
SKIP_TEXTS: dict[str, str] = {
    AuditSkip.COMPILED.value: "the job uses torch.compile",
    AuditSkip.SCRIPTED.value: "the module is scripted",
    AuditSkip.MIXED_PRECISION.value: "DDP's mixed precision",
    AuditSkip.MODULE_HOOKS.value: "the job has hooks on modules",
    AuditSkip.FUNCTION_MODES.value: "a function mode of the program",
    AuditSkip.TENSOR_TYPES.value: "parameters or buffers that are not plain tensors",
    AuditSkip.IGNORED_PARAMETERS.value: "DDP ignores some parameters",
    AuditSkip.COLLECTIVES.value: "the forward issues collectives",
    AuditSkip.INPUTS.value: "inputs or attributes that are not tensors or plain values",
    AuditSkip.OUTPUTS.value: "the outputs have no gradient",
    AuditSkip.SIZE.value: "the micro-batch is larger than 1 GiB",
    AuditSkip.SEVERAL_FORWARDS.value: "several forwards before a backward",
    AuditSkip.EARLIER_GRADIENTS.value: "there were gradients from an earlier backward",
    AuditSkip.OTHER_PATHS.value: "the loss does not reach the parameters through the outputs alone",
    AuditSkip.WEIGHTED_BACKWARD.value: "backward was called with weights",
    AuditSkip.SEVERAL_BACKWARDS.value: "several backwards of one forward",
    AuditSkip.NO_BACKWARD.value: "no backward followed",
    AuditSkip.PARAMETERS_WRITTEN.value: "parameters were written before the backward ended",
    AuditSkip.PARAMETERS_DIFFER.value: "ranks had different parameters",
    AuditSkip.NOT_HANDED_OVER.value: "the file of the other rank was not there",
    AuditSkip.UNREADABLE.value: "the file of the other rank could not be read",
    AuditSkip.RAISED.value: "the module raised when it was run again",
}


@dataclass(frozen=True)
class OutlierDevice:
    """Ranks whose results differ from those of the others. Not certain: it is one of them."""

    ranks: tuple[int, ...]
    certain: bool
    rounds: tuple[Round, ...]
    # Whether it also computed other gradients for other ranks' micro-batches.
    lasting: bool

    @property
    def first(self) -> Round:
        return self.rounds[0]

    def differences(self) -> tuple[Difference, ...]:
        """In the first round, those that its own ballots have."""
        return tuple(each for each in self.first.differences if set(self.ranks) & set(each.voters))


@dataclass(frozen=True)
class Judgement:
    """Of one module."""

    outliers: tuple[OutlierDevice, ...]
    # Rounds in which no single device explains the differences.
    unexplained: int


def judge(stats: AuditStats) -> Judgement:
    """A device is named only where all others agree with each other, so that the module is known to be reproducible."""
    by_ranks: dict[tuple[tuple[int, ...], bool], list[Round]] = {}
    unexplained = 0
    for round_ in sorted(stats.differing, key=lambda each: each.step):
        suspects, certain = _named(round_, stats.agreeing)
        if suspects:
            by_ranks.setdefault((suspects, certain), []).append(round_)
        else:
            unexplained += 1
    if unexplained > _LARGEST_UNEXPLAINED * stats.rounds:
        return Judgement((), len(stats.differing))
    outliers = [
        OutlierDevice(ranks, certain, tuple(rounds), _is_lasting(set(ranks), rounds))
        for (ranks, certain), rounds in by_ranks.items()
    ]
    return Judgement(tuple(outliers), unexplained)


def _named(round_: Round, agreeing: int) -> tuple[tuple[int, ...], bool]:
    """The ranks that explain the differences of a round, and whether all of them are meant."""
    suspects = round_.suspects()
    if len(suspects) == 1:
        known = round_.witnesses(suspects)
        # In a job of one or two ranks, other rounds bear witness too.
        enough = known > 0 and max(known, agreeing - len(round_.agreeing)) >= FEWEST_WITNESSES
        alone = len(round_.ballots) == 1 and agreeing >= FEWEST_WITNESSES
        return (suspects, True) if enough or alone else ((), False)
    if suspects:
        # Two ranks contradict each other, and no third one computed the same.
        return (suspects, False) if agreeing >= FEWEST_WITNESSES else ((), False)
    several = round_.transient()
    return (several, True) if several and round_.witnesses(several) >= FEWEST_WITNESSES else ((), False)


def _is_lasting(ranks: set[int], rounds: list[Round]) -> bool:
    """Whether a rank differs on the micro-batches of others too, so that its device fails again and again."""
    return any(
        difference.source not in ranks and ranks & set(difference.voters)
        for round_ in rounds
        for difference in round_.differences
    )
