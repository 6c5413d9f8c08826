"""A run under way on a whole screen: what the panel under a job says, and its ranks, or those that stand out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.text import Text

from ddpcheck.analysis.live.state import LiveRank, LiveState, LiveStepTime
from ddpcheck.formatting import name_ranks, size_text, time_text
from ddpcheck.reports.terminal.bars import step_bar, step_legend
from ddpcheck.reports.terminal.console import LABEL, QUIET, ReportConsole, indented
from ddpcheck.reports.terminal.sparkline import STYLE, sparkline
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


def pace_texts(pace: LiveStepTime) -> list[str]:
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


HEIGHT = 4
_MOST_BARS = 24
_FEWEST_BARS = 6


def panel_lines(state: LiveState, console: Console, columns: int) -> list[str]:
    """`HEIGHT` lines of at most `columns` - 1 characters, with their colours."""
    ink = ReportConsole(console)
    rows = [
        _live_panel_title(ink, state, columns - 1),
        _live_panel_course(ink, state),
        _live_panel_pace(ink, state, columns),
        _live_panel_found(ink, state),
    ]
    return [_drawn(console, row, columns - 1) for row in rows]


def _drawn(console: Console, row: Text, width: int) -> str:
    row.truncate(width, overflow="crop")
    with console.capture() as captured:
        console.print(row, end="", no_wrap=True, overflow="ignore", crop=False, width=width, highlight=False)
    return captured.get()


def _live_panel_title(ink: ReportConsole, state: LiveState, width: int) -> Text:
    line = "-" if ink.console.options.ascii_only else "─"
    told = ink.text(f"{line * 2} ")
    told.append("ddpcheck", LABEL)
    told.append(ink.text(f" {state.name}, {ranks_text(state)}, {clock_text(state.seconds)} "))
    return told.append(line * max(0, width - len(told)), QUIET)


def _live_panel_course(ink: ReportConsole, state: LiveState) -> Text:
    said, style = agreement_text(state)
    others = f" (others from {state.fewest_steps:,})" if state.fewest_steps != state.steps else ""
    return Text.assemble(
        ink.text(f"step {state.steps:,}", LABEL), ink.text(f"{others}   "), ink.text(said, style)
    )


def _live_panel_pace(ink: ReportConsole, state: LiveState, columns: int) -> Text:
    if state.pace is None:
        return ink.text("no step has been clocked so far", QUIET)
    step, *shares = pace_texts(state.pace)
    figures = "".join(f"   {part}" for part in (*shares, memory_text(state)) if part)
    # Figures come first where there is little room.
    width = min(_MOST_BARS, columns - 1 - len(step) - 1 - len(figures))
    latest = state.pace.course_us[-width:] if width >= _FEWEST_BARS else ()
    bars = sparkline(latest, width, ink.console.options.ascii_only)
    return Text.assemble(ink.text(f"{step} " if bars else step), ink.text(bars, STYLE), ink.text(figures))


def _live_panel_found(ink: ReportConsole, state: LiveState) -> Text:
    said, style = finding_text(state)
    return ink.text(said, style)


# Up to so many ranks have a row each; of more, so many of each kind that stands out.
_MOST_ROWS = 16
_MOST_OF_A_KIND = 4
_BARS = 32
_BAR = 22
_STYLES = {"running": "", "finished": "green", "raised": "bold red", "vanished": "bold red"}


def live_view(state: LiveState, console: Console) -> RenderableType:
    """The state as it is at this moment."""
    ink = ReportConsole(console)
    blocks = [_title(ink, state), Text(), _course(ink, state), *_pace(ink, state), _found(ink, state)]
    if state.ranks:
        blocks += [Text(), *_ranks(ink, state)]
    return Group(*blocks)


def _title(ink: ReportConsole, state: LiveState) -> Text:
    condition = "ended" if state.ended else "its launcher is gone" if state.abandoned else "under way"
    told = f"  {condition}, {ranks_text(state)}, {clock_text(state.seconds)}"
    return Text.assemble(ink.text(state.name, LABEL), ink.text(told, QUIET))


def _course(ink: ReportConsole, state: LiveState) -> Text:
    said, style = agreement_text(state)
    return Text.assemble(ink.text(f"step {state.steps:,}   ", LABEL), ink.text(said, style))


def _pace(ink: ReportConsole, state: LiveState) -> list[RenderableType]:
    if state.pace is None:
        return []
    step, *shares = pace_texts(state.pace)
    bars = sparkline(state.pace.course_us, _BARS, ink.console.options.ascii_only)
    figures = ink.text("   ".join(filter(None, [*shares, memory_text(state)])))
    return [Text.assemble(ink.text(f"{step} "), ink.text(bars, STYLE)), figures]


def _found(ink: ReportConsole, state: LiveState) -> Text:
    said, style = finding_text(state)
    return ink.text(said, style)


def _ranks(ink: ReportConsole, state: LiveState) -> list[RenderableType]:
    shown = standing_out(state)
    few = len(state.ranks) <= _MOST_ROWS
    longest = max((rank.step_us or 0 for _, rank in shown), default=0)
    headers = ["rank", "host", "steps", "a step", step_legend(), "memory", "status" if few else "because it"]
    rows = [_row(ink, rank, longest, rank.status if few else why) for why, rank in shown]
    told = f"  {status_text(state)}, {_spread(state)}"
    title = Text.assemble(ink.text("Ranks", LABEL), ink.text(told, QUIET))
    return [title, indented(ink.columns(headers, rows))] if rows else [title]


def _spread(state: LiveState) -> str:
    if state.fewest_steps == state.steps:
        return f"all at step {state.steps:,}"
    behind = sum(rank.steps < state.steps for rank in state.ranks)
    return f"{behind} behind, from step {state.fewest_steps:,} on"


def _row(ink: ReportConsole, rank: LiveRank, longest: int, why: str) -> list[object]:
    return [
        rank.rank,
        rank.host,
        f"{rank.steps:,}",
        "-" if rank.step_us is None else time_text(rank.step_us * 1000),
        step_bar(rank.parts_us, longest, _BAR),
        size_text(rank.memory) if rank.memory else "-",
        ink.text(why, _STYLES.get(rank.status, "")),
    ]


def standing_out(state: LiveState) -> list[tuple[str, LiveRank]]:
    """All of a few ranks; of many those that somebody would look for, each with why, and once."""
    if len(state.ranks) <= _MOST_ROWS:
        return [("", rank) for rank in state.ranks]
    odd = set(state.agreement.odd)
    clocked = [rank for rank in state.ranks if rank.step_us]
    late = state.pace is not None and state.pace.late >= 0.1
    kinds: Sequence[tuple[str, list[LiveRank]]] = (
        ("stands apart", [rank for rank in state.ranks if rank.rank in odd]),
        ("raised", [rank for rank in state.ranks if rank.status == "raised"]),
        ("vanished", [rank for rank in state.ranks if rank.status == "vanished"]),
        ("is behind", sorted((r for r in state.ranks if r.steps < state.steps), key=lambda r: r.steps)),
        ("is waited for", sorted(clocked, key=lambda r: r.parts_us.get("wait", 0)) if late else []),
        ("holds most", sorted(state.ranks, key=lambda r: -r.memory)[:1]),
    )
    shown: dict[int, tuple[str, LiveRank]] = {}
    for why, ranks in kinds:
        for rank in ranks[:_MOST_OF_A_KIND]:
            shown.setdefault(rank.rank, (why, rank))
    return list(shown.values())
