"""A job that is running: a panel of four lines below its output, and the full screen of `ddpcheck watch`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.text import Text

from ddpcheck.analysis.live.tracker import LiveRank, LiveState, LiveStepTime
from ddpcheck.formatting import name_ranks, size_text, time_text
from ddpcheck.reports.terminal.charts import STYLE, sparkline, step_bar, step_legend
from ddpcheck.reports.terminal.console import LABEL, QUIET, ReportConsole, indented
from ddpcheck.reports.verdict import counted
from ddpcheck.reports.views.cost import share_text

# Lines of the panel.
HEIGHT = 4
# Bars of the panel's sparkline, and of the screen's.
_MOST_PANEL_BARS, _FEWEST_PANEL_BARS = 24, 6
_SCREEN_BARS = 32
_STEP_BAR = 22
# Characters of the exception of a rank.
_MOST_CHARACTERS = 100
# Up to this many ranks have a row each; of more ranks, this many for each reason to show them.
_MOST_ROWS = 16
_MOST_PER_REASON = 4
# Waiting for stragglers from this share of a step on names the straggler.
_STRAGGLER_SHARE = 0.1
_STATUS_STYLES = {"running": "", "finished": "green", "raised": "bold red", "vanished": "bold red"}

Styled = tuple[str, str]


def panel_lines(state: LiveState, console: Console, columns: int) -> list[str]:
    """`HEIGHT` lines of at most `columns` - 1 characters, with colours."""
    out = ReportConsole(console)
    rows = [
        _panel_title(out, state, columns - 1),
        _panel_progress(out, state),
        _panel_step_time(out, state, columns),
        out.text(*finding_text(state)),
    ]
    return [_one_line(console, row, columns - 1) for row in rows]


def live_view(state: LiveState, console: Console) -> RenderableType:
    """The full screen."""
    out = ReportConsole(console)
    blocks = [
        _screen_title(out, state),
        Text(),
        Text.assemble(
            out.text(f"{counted(state.steps, 'step')}   ", LABEL), out.text(*agreement_text(state))
        ),
        *_screen_step_time(out, state),
        out.text(*finding_text(state)),
    ]
    if state.ranks:
        blocks += [Text(), *_screen_ranks(out, state)]
    return Group(*blocks)


def ranks_text(state: LiveState) -> str:
    """`4 ranks`, or how many of them have reported."""
    if not state.ranks:
        return "no rank yet"
    reported = len(state.ranks)
    all_reported = reported >= state.world_size
    text = counted(reported, "rank") if all_reported else f"{reported} of {state.world_size} ranks"
    return f"{text}, attempt {state.attempt}" if state.attempt else text


def clock_text(seconds: float) -> str:
    """`42 s`, `3 min 05 s` or `2 h 10 min`."""
    total = int(seconds)
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60:02d} s"
    return f"{total // 3600} h {total % 3600 // 60:02d} min"


def agreement_text(state: LiveState) -> Styled:
    """Whether replicas agree so far, with a style."""
    agreement = state.agreement
    if agreement.diverged:
        where = "at wrapping" if agreement.step is None else f"at step {agreement.step}"
        return f"replicas diverge {where} (outlier: {name_ranks(agreement.outliers)})", "bold red"
    if agreement.not_compared:
        parameters = counted(agreement.not_compared, "trained parameter")
        others = f", {counted(agreement.compared, 'step')} of others agree" if agreement.compared else ""
        return f"{parameters} not compared{others}", "bold yellow"
    if not agreement.compared:
        return "nothing compared yet", "dim"
    steps = "1 step" if agreement.compared == 1 else f"{agreement.compared:,} steps"
    return f"replicas agree, {steps} compared", "green"


def step_time_texts(times: LiveStepTime) -> list[str]:
    """The step time, then the shares of exposed communication and of waiting for stragglers."""
    straggler = f" (rank {times.latest_rank})" if times.late >= _STRAGGLER_SHARE else ""
    return [
        f"{time_text(times.step_us * 1000)}/step",
        f"exposed {_percent(times.exposed)}",
        f"waiting {_percent(times.late)}{straggler}",
    ]


def memory_text(state: LiveState) -> str:
    """The memory of the ranks, from the minimum to the maximum."""
    sizes = [rank.memory for rank in state.ranks if rank.memory]
    if not sizes:
        return ""
    low, high = size_text(min(sizes)), size_text(max(sizes))
    if low == high:
        return f"memory {high}"
    # The unit is written once if both have the same.
    return f"memory {low.removesuffix(high[-3:])}-{high}" if low[-3:] == high[-3:] else f"memory {low}-{high}"


def cost_text(state: LiveState) -> str:
    """ddpcheck's own share of a step; empty before the first measurement."""
    return "" if state.cost_share is None else f"ddpcheck {share_text(state.cost_share)}"


def finding_text(state: LiveState) -> Styled:
    """The finding, else an exception or a stall, with a style."""
    finding = state.finding
    if finding is not None:
        where = "" if finding.step is None else f" at step {finding.step}"
        ranks = f" ({name_ranks(finding.ranks)})" if finding.ranks else ""
        return f"{finding.code}{where}: {finding.title}{ranks}", "bold red"
    raised = [rank for rank in state.ranks if rank.status == "raised"]
    if raised:
        error = raised[0].error.partition("\n")[0][:_MOST_CHARACTERS]
        return f"{name_ranks(rank.rank for rank in raised)} raised: {error}", "bold red"
    if state.stalled and not state.ended:
        return f"no rank has made progress for {clock_text(state.quiet_seconds)}", "yellow"
    return "no findings yet", "dim"


def status_text(state: LiveState) -> str:
    """How many ranks have each status."""
    counts = Counter(rank.status for rank in state.ranks)
    return ", ".join(f"{number} {status}" for status, number in counts.items())


def notable_ranks(state: LiveState) -> list[tuple[str, LiveRank]]:
    """All of a few ranks; of many ranks the notable ones, each once with the first reason."""
    if len(state.ranks) <= _MOST_ROWS:
        return [("", rank) for rank in state.ranks]
    outliers = set(state.agreement.outliers)
    timed = [rank for rank in state.ranks if rank.step_us]
    has_straggler = state.step_time is not None and state.step_time.late >= _STRAGGLER_SHARE
    reasons: Sequence[tuple[str, list[LiveRank]]] = (
        ("outlier", [rank for rank in state.ranks if rank.rank in outliers]),
        ("raised", [rank for rank in state.ranks if rank.status == "raised"]),
        ("vanished", [rank for rank in state.ranks if rank.status == "vanished"]),
        ("behind", sorted((r for r in state.ranks if r.steps < state.steps), key=lambda r: r.steps)),
        ("straggler", sorted(timed, key=lambda r: r.parts_us.get("wait", 0)) if has_straggler else []),
        ("most memory", sorted(state.ranks, key=lambda r: -r.memory)[:1]),
    )
    notable: dict[int, tuple[str, LiveRank]] = {}
    for reason, ranks in reasons:
        for rank in ranks[:_MOST_PER_REASON]:
            notable.setdefault(rank.rank, (reason, rank))
    return list(notable.values())


def _panel_title(out: ReportConsole, state: LiveState, width: int) -> Text:
    rule = "-" if out.console.options.ascii_only else "─"
    title = out.text(f"{rule * 2} ")
    title.append("ddpcheck", LABEL)
    title.append(out.text(f" {state.name}, {ranks_text(state)}, {clock_text(state.seconds)} "))
    return title.append(rule * max(0, width - len(title)), QUIET)


def _panel_progress(out: ReportConsole, state: LiveState) -> Text:
    behind = f" (slowest rank {state.fewest_steps:,})" if state.fewest_steps != state.steps else ""
    return Text.assemble(
        out.text(counted(state.steps, "step"), LABEL),
        out.text(f"{behind}   "),
        out.text(*agreement_text(state)),
    )


def _panel_step_time(out: ReportConsole, state: LiveState, columns: int) -> Text:
    if state.step_time is None:
        return out.text("no step measured yet", QUIET)
    step, *shares = step_time_texts(state.step_time)
    figures = "".join(f"   {part}" for part in (*shares, memory_text(state), cost_text(state)) if part)
    # Figures have priority over bars.
    width = min(_MOST_PANEL_BARS, columns - 1 - len(step) - 1 - len(figures))
    latest = state.step_time.recent_us[-width:] if width >= _FEWEST_PANEL_BARS else ()
    bars = sparkline(latest, width, out.console.options.ascii_only)
    return Text.assemble(out.text(f"{step} " if bars else step), out.text(bars, STYLE), out.text(figures))


def _one_line(console: Console, row: Text, width: int) -> str:
    row.truncate(width, overflow="crop")
    with console.capture() as captured:
        console.print(row, end="", no_wrap=True, overflow="ignore", crop=False, width=width, highlight=False)
    return captured.get()


def _screen_title(out: ReportConsole, state: LiveState) -> Text:
    status = "ended" if state.ended else "its launcher is gone" if state.abandoned else "running"
    text = f"  {status}, {ranks_text(state)}, {clock_text(state.seconds)}"
    return Text.assemble(out.text(state.name, LABEL), out.text(text, QUIET))


def _screen_step_time(out: ReportConsole, state: LiveState) -> list[RenderableType]:
    if state.step_time is None:
        return []
    step, *shares = step_time_texts(state.step_time)
    bars = sparkline(state.step_time.recent_us, _SCREEN_BARS, out.console.options.ascii_only)
    figures = out.text("   ".join(filter(None, [*shares, memory_text(state), cost_text(state)])))
    return [Text.assemble(out.text(f"{step} "), out.text(bars, STYLE)), figures]


def _screen_ranks(out: ReportConsole, state: LiveState) -> list[RenderableType]:
    shown = notable_ranks(state)
    all_shown = len(state.ranks) <= _MOST_ROWS
    longest = max((rank.step_us or 0 for _, rank in shown), default=0)
    last = "status" if all_shown else "reason"
    headers = ["rank", "host", "steps", "step", step_legend(), "memory", last]
    rows = [_rank_row(out, rank, longest, rank.status if all_shown else reason) for reason, rank in shown]
    text = f"  {status_text(state)}, {_progress(state)}"
    title = Text.assemble(out.text("Ranks", LABEL), out.text(text, QUIET))
    return [title, indented(out.columns(headers, rows))] if rows else [title]


def _progress(state: LiveState) -> str:
    if state.fewest_steps == state.steps:
        return f"all after {counted(state.steps, 'step')}"
    behind = sum(rank.steps < state.steps for rank in state.ranks)
    return f"{behind} behind, the slowest after {counted(state.fewest_steps, 'step')}"


def _rank_row(out: ReportConsole, rank: LiveRank, longest: int, reason: str) -> list[object]:
    return [
        rank.rank,
        rank.host,
        f"{rank.steps:,}",
        "-" if rank.step_us is None else time_text(rank.step_us * 1000),
        step_bar(rank.parts_us, longest, _STEP_BAR),
        size_text(rank.memory) if rank.memory else "-",
        out.text(reason, _STATUS_STYLES.get(rank.status, "")),
    ]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
