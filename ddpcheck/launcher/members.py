"""The ranks that one launcher can ask and look at: those on its own board."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ddpcheck.agent.shm_exchange import Sign
from ddpcheck.analysis.aggregate.launch import Attempt, Rank
from ddpcheck.launcher.activity import read_activity
from ddpcheck.launcher.hang.classifier import Sighting
from ddpcheck.launcher.process.process_table import Process, all_processes, descendants, read_process

# Probes without which a rank cannot be asked.
_SPEAKERS = ("agent", "standing")


@dataclass(frozen=True)
class Member:
    """One rank of an attempt, and what its process shows."""

    rank: Rank
    sign: Sign
    process: Process | None

    @property
    def is_over(self) -> bool:
        """Said goodbye, or is gone without."""
        header, process = self.rank.header, self.process
        if self.rank.end is not None or process is None or process.is_gone:
            return True
        return bool(header.ticks) and process.started != header.ticks

    @property
    def is_stopped(self) -> bool:
        """By Ctrl-Z or by a debugger."""
        return self.process is not None and self.process.state in {"T", "t"}

    @property
    def is_mute(self) -> bool:
        """Whether the part of ddpcheck that would answer has failed in there."""
        return any(fault.probe in _SPEAKERS for fault in self.rank.faults)

    def has_answered(self, question: int) -> bool:
        return self.rank.standing is not None and self.rank.standing.look == question


def members_of(attempt: Attempt, host: str, signs: Mapping[int, Sign]) -> dict[int, Member]:
    """By rank. A launcher on the same host may have others, on a board of its own."""
    return {
        number: Member(rank, signs[rank.header.pid], read_process(rank.header.pid))
        for number, rank in attempt.ranks.items()
        if rank.header.host == host and rank.header.pid in signs
    }


def sight_all(members: Mapping[int, Member], question: int, now: float) -> dict[int, Sighting]:
    """One look at every rank, after it has answered `question` or had the time to."""
    table = all_processes()
    return {number: _sight(member, question, now, table) for number, member in members.items()}


def _sight(member: Member, question: int, now: float, table: list[Process]) -> Sighting:
    said, pid = member.rank.standing, member.rank.header.pid
    if member.is_over:
        return Sighting(now, said, left=True)
    # One that does not answer may have told earlier which thread trains; most often it is the first.
    thread = said.thread if said is not None and said.thread else pid
    activity = read_activity(pid, thread, member.sign.own_threads, descendants(pid, among=table))
    return Sighting(now, said if member.has_answered(question) else None, activity)
