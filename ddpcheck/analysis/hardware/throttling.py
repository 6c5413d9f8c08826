"""Whether a late rank's GPU had its clocks held down, by heat or power, while those of the others ran freely."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from ddpcheck.analysis.hardware.samples import NodeSamples
from ddpcheck.analysis.hardware.statistics import GpuStatistics

# Of the samples while ranks stepped: so many of them, and held down in so large a share.
FEWEST_SAMPLES = 4
LEAST_SHARE = 0.5
# The others may have been held down as well, as under a power cap; but in half as many samples at most.
MOST_OF_OTHERS = 0.5
# Clocks that are no lower than the others' explain nothing.
MOST_OF_CLOCK = 0.97


@dataclass(frozen=True)
class Throttling:
    """The GPUs of late ranks, while ranks stepped."""

    # By reason, the share of samples; of the late ranks' GPUs, the most of any.
    reasons: Mapping[str, float]
    # Host and index, as "node1:3".
    gpus: tuple[str, ...]
    # MHz on average, of theirs and of the others'; None where it was not told.
    clock: float | None
    others_clock: float | None


@dataclass(frozen=True)
class _Seat:
    """A GPU on which a rank's process was seen."""

    name: str
    tally: GpuStatistics

    @property
    def share(self) -> float:
        return max(self.tally.throttling().values(), default=0.0)

    @property
    def clock(self) -> float | None:
        row = self.tally.clock.row()
        return None if row is None else row["mean"]


def throttled(
    nodes: Sequence[NodeSamples], late: Collection[int], group: Collection[int]
) -> Throttling | None:
    """None where that is not the reason, or not known of every rank of the group."""
    seats = {rank: _seats(nodes, rank) for rank in group}
    if not all(seats.values()):
        return None
    theirs = [seat for rank in late for seat in seats[rank]]
    others = [seat for rank in group if rank not in late for seat in seats[rank]]
    least = min((max(seat.share for seat in seats[rank]) for rank in late), default=0.0)
    if least < LEAST_SHARE or max((seat.share for seat in others), default=1.0) > MOST_OF_OTHERS * least:
        return None
    clock, usual = _clock(theirs), _clock(others)
    if clock is not None and usual is not None and clock > MOST_OF_CLOCK * usual:
        return None
    reasons: dict[str, float] = {}
    for seat in theirs:
        for reason, share in seat.tally.throttling().items():
            reasons[reason] = max(share, reasons.get(reason, 0.0))
    return Throttling(reasons, tuple(sorted({seat.name for seat in theirs})), clock, usual)


def _seats(nodes: Sequence[NodeSamples], rank: int) -> list[_Seat]:
    found = []
    for node in nodes:
        places = node.tally.ranks.get(str(rank), {}).get("gpus", ())
        for place in places:
            tally = node.stepping[place] if place < len(node.stepping) else GpuStatistics()
            if tally.count >= FEWEST_SAMPLES:
                found.append(_Seat(f"{node.host}:{node.gpu_index(place)}", tally))
    return found


def _clock(seats: Sequence[_Seat]) -> float | None:
    clocks = [seat.clock for seat in seats if seat.clock is not None]
    return mean(clocks) if clocks else None
