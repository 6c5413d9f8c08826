"""Clocks of the hosts that are apart."""

from __future__ import annotations

from ddpcheck.doctor.context import DoctorContext
from ddpcheck.doctor.diagnosis import Diagnosis, Level
from ddpcheck.formatting import seconds_text

NAME = "clocks"
# Hosts that ask a time server agree to some milliseconds.
_MUCH = 1.0


def find(scene: DoctorContext) -> list[Diagnosis]:
    if not scene.clocks:
        return []
    # No more than what is certain.
    apart = {clock.host: abs(clock.offset) - clock.uncertainty for clock in scene.clocks}
    late = [clock for clock in scene.clocks if apart[clock.host] > _MUCH]
    if not late:
        most = max(abs(clock.offset) for clock in scene.clocks)
        known = max(clock.uncertainty for clock in scene.clocks)
        told = f"at most {seconds_text(max(most, 1e-3))} apart, give or take {seconds_text(max(known, 1e-3))}"
        return [Diagnosis(NAME, Level.OK, told)]
    worst = max(late, key=lambda clock: abs(clock.offset))
    way = "ahead of" if worst.offset > 0 else "behind"
    more = f"; {len(late) - 1} more are more than {_MUCH:g} s off" if len(late) > 1 else ""
    return [
        Diagnosis(
            NAME,
            Level.WARNING,
            f"The clock of {worst.host} is {seconds_text(abs(worst.offset))} {way} that of rank 0's host{more}.",
            "Logs and traces of hosts do not fit together, files on shared storage look newer or older than they "
            "are, and storage services refuse requests of a wrong time.",
            "Let all hosts ask the same time server (`timedatectl`, `chronyc tracking`).",
            hosts=tuple(clock.host for clock in late),
            evidence={clock.host: round(clock.offset, 3) for clock in late},
        )
    ]
