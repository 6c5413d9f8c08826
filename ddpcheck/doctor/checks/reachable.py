"""Whether hosts can connect to each other at the addresses that gloo takes, as they tried."""

from __future__ import annotations

from ddpcheck.doctor.context import ConnectionAttempt, DoctorContext
from ddpcheck.doctor.diagnosis import Diagnosis, Level

NAME = "connections"
_MOST_TOLD = 4


def find(scene: DoctorContext) -> list[Diagnosis]:
    if not scene.calls:
        return []
    failed: dict[tuple[str, str], list[ConnectionAttempt]] = {}
    for call in scene.calls:
        if call.reason:
            failed.setdefault((call.called, call.address), []).append(call)
    if not failed:
        return [Diagnosis(NAME, Level.OK, f"{len(scene.calls)} tried between hosts, all came through")]
    return [_unreachable(scene, *key, calls) for key, calls in failed.items()]


def _unreachable(
    scene: DoctorContext, called: str, address: str, calls: list[ConnectionAttempt]
) -> Diagnosis:
    tried = sum(call.called == called for call in scene.calls)
    callers = [call.caller for call in calls]
    who = "No other host" if len(calls) == tried else f"{', '.join(callers[:_MOST_TOLD])}"
    more = (
        f" and {len(callers) - _MOST_TOLD} more" if len(calls) < tried and len(callers) > _MOST_TOLD else ""
    )
    verb = "can reach" if len(calls) == tried else "cannot reach"
    reasons = ", ".join(sorted({call.reason for call in calls}))
    return Diagnosis(
        NAME,
        Level.PROBLEM,
        f"{who}{more} {verb} {called} at {address} ({reasons}).",
        "gloo binds to this address there, and its ranks would wait for connections that never come.",
        "If the address is right, look for a firewall between the hosts; if it is not, set GLOO_SOCKET_IFNAME there.",
        hosts=(called,),
        evidence={"callers": callers[:64]},
    )
