"""The state of a run in words, for the panel under a job and for `ddpcheck watch` alike."""

from __future__ import annotations

from collections import Counter

from ddpcheck.analysis.live.state import LiveState, Pace
from ddpcheck.analysis.units import size_text
from ddpcheck.formatting import name_ranks
from ddpcheck.reports.trace_units import time_text
from ddpcheck.reports.verdict import counted

# Of what a rank said when it raised.
_MOST_CHARACTERS = 100

Styled = tuple[str, str]


def ranks_text(state: LiveState) -> str:
    """`4 ranks`, or how many of them are there."""
    if not state.ranks:
        return "no rank yet"
    here = len(state.ranks)
    told = f"{here} of {state.world_size} ranks" if here < state.world_size else counted(here, "rank")
    return f"{told}, start {state.attempt + 1}" if state.attempt else told


def clock_text(seconds: float) -> str:
    """`42 s`, `3 min 05 s` or `2 h 10 min`."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def agreement_text(state: LiveState) -> Styled:
    """Whether replicas agree so far, and the style that says the same."""
    told = state.agreement
    if told.parted:
        where = "at wrapping" if told.step is None else f"at step {told.step}"
        return f"replicas part {where} ({name_ranks(told.odd)})", "bold red"
    if not told.compared:
        return "nothing compared so far", "dim"
    steps = "1 step" if told.compared == 1 else f"{told.compared:,} steps"
    return f"replicas agree, {steps} compared", "green"


def pace_texts(pace: Pace) -> list[str]:
    """The step, then what of it is exposed communication and what waiting."""
    texts = [f"{time_text(pace.step_us * 1000)} a step", f"exposed {_percent(pace.exposed)}"]
    # A rank is late where the others wait for it, and not by chance.
    late = f" (rank {pace.latest_rank})" if pace.late >= 0.1 else ""
    return [*texts, f"late {_percent(pace.late)}{late}"]


def memory_text(state: LiveState) -> str:
    """What ranks hold, from the least to the most."""
    held = [rank.memory for rank in state.ranks if rank.memory]
    if not held:
        return ""
    low, high = size_text(min(held)), size_text(max(held))
    if low == high:
        return f"memory {high}"
    # One unit is enough where it is the same.
    return f"memory {low.removesuffix(high[-3:])}-{high}" if low[-3:] == high[-3:] else f"memory {low}-{high}"


def finding_text(state: LiveState) -> Styled:
    """The finding, or what else somebody should know."""
    if state.finding is not None:
        found = state.finding
        where = "" if found.step is None else f" at step {found.step}"
        who = f" ({name_ranks(found.ranks)})" if found.ranks else ""
        return f"{found.code}{where}: {found.title}{who}", "bold red"
    raised = [rank for rank in state.ranks if rank.status == "raised"]
    if raised:
        said = raised[0].error.partition("\n")[0][:_MOST_CHARACTERS]
        return f"{name_ranks(rank.rank for rank in raised)} raised: {said}", "bold red"
    if state.stalled and not state.ended:
        return f"no rank has got any further for {clock_text(state.quiet_seconds)}", "yellow"
    return "no finding so far", "dim"


def status_text(state: LiveState) -> str:
    """How many ranks run, and how many do no longer."""
    counts = Counter(rank.status for rank in state.ranks)
    return ", ".join(f"{number} {status}" for status, number in counts.items())


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
