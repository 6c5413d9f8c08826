"""What a slow link costs in each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddpcheck.analysis.network.model import SlowLink
from ddpcheck.analysis.timing.model import TimeTable


@dataclass(frozen=True)
class Cost:
    """Microseconds of a step, and of how long a one."""

    cost_us: int
    step_us: int

    @property
    def share(self) -> float:
        return self.cost_us / self.step_us


def cost_of(slow: SlowLink, tables: Sequence[TimeTable]) -> Cost | None:
    """What the link takes longer than one like the others would, as far as the ranks wait for it.

    Transfers that hide behind the backward cost nothing. None where no step was clocked.
    """
    lost = slow.seconds_lost_a_step()
    if lost is None or not tables:
        return None
    waiting = max(tables, key=lambda table: table.scaling.exposed_communication * table.step_us)
    exposed = waiting.scaling.exposed_communication * waiting.step_us
    return Cost(round(max(0.0, min(lost * 1e6, exposed))), max(1, waiting.step_us))
