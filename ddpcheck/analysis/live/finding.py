"""What the rules say of ranks that have parted, while the job still runs."""

from __future__ import annotations

from pathlib import Path

from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.context import Case
from ddpcheck.analysis.finding import Finding
from ddpcheck.analysis.run_reader import NodeNotes
from ddpcheck.rules.divergence import ddp201, ddp202, ddp203, ddp205, ddp206, ddp208, ddp210
from ddpcheck.rules.registry import Rule
from ddpcheck.rules.wrapping import ddp101, ddp103, ddp104

# Those that hold however the job goes on: others count, or wait for the end.
_RULES: tuple[Rule, ...] = tuple(
    rule.find for rule in (ddp103, ddp101, ddp104, ddp202, ddp203, ddp205, ddp206, ddp208, ddp201, ddp210)
)
# When to look after the parting: at once, and again when all ranks have written what they know of it.
_LOOKS = (0.0, 2.0, 10.0)


class LiveFindings:
    """The gravest finding of each start of the job; rules are asked a few times, not at every turn."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found: dict[str, Finding | None] = {}
        self._looked: dict[str, tuple[float, int]] = {}

    def latest(self, attempt: Attempt, number: int, now: float) -> Finding | None:
        """Of ranks that are known to have parted."""
        since, looks = self._looked.get(attempt.session, (now, 0))
        if looks < len(_LOOKS) and now - since >= _LOOKS[looks]:
            self._looked[attempt.session] = since, looks + 1
            self._found[attempt.session] = self._ask(attempt, number)
        return self._found.get(attempt.session)

    def _ask(self, attempt: Attempt, number: int) -> Finding | None:
        case = Case(attempt, number, self._folder, NodeNotes(), (), None)
        for rule in _RULES:
            try:
                found = rule(case)
            except Exception:
                # What a rule needs may not be there yet; the report at the end tells of rules that fail.
                continue
            if found:
                return found[0]
        return None
