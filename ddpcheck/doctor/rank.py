"""The doctor in one rank: collect facts, open a listener, exchange with the other ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ddpcheck.doctor.context import DoctorContext
from ddpcheck.doctor.facts.machine import collect
from ddpcheck.doctor.facts.record import Facts
from ddpcheck.doctor.facts.torch_build import torch_facts
from ddpcheck.doctor.interface_selection import gloo_choice
from ddpcheck.doctor.model import DoctorReport
from ddpcheck.doctor.rendezvous import Listener, RendezvousFailed, exchange, open_store


def report_as_rank(folder: Path, injection: dict[str, Any], seconds: float) -> tuple[DoctorReport, bool]:
    """The report, and whether this rank is the first of its machine."""
    facts = collect(folder, torch_facts, lambda: injection)
    if facts.rank is None or facts.world_size is None:
        return DoctorReport.of(DoctorContext((facts,))), True
    listener = _open_listener(facts)
    if listener is not None:
        facts = replace(facts, listener=listener.described())
    try:
        return _report_of_job(facts, seconds)
    except RendezvousFailed as error:
        return _report_of_this_rank(facts, str(error))
    finally:
        if listener is not None:
            listener.close()


def _report_of_job(facts: Facts, seconds: float) -> tuple[DoctorReport, bool]:
    if facts.torch.get("error"):
        raise RendezvousFailed("torch cannot be imported")
    client = open_store(facts.rank or 0, seconds)
    try:
        report = exchange(client, facts, seconds)
    except RuntimeError as error:  # the store is gone, usually because rank 0 ended
        raise RendezvousFailed(f"the store stopped answering: {str(error).partition(chr(10))[0]}") from error
    if report is None:
        raise RendezvousFailed("rank 0 created no report")
    first = {host.first.rank for host in report.context.hosts}
    return report, facts.rank in first


def _report_of_this_rank(facts: Facts, reason: str) -> tuple[DoctorReport, bool]:
    context = DoctorContext((facts,), facts.world_size, rendezvous_error=reason)
    return DoctorReport.of(context), not facts.local_rank


def _open_listener(facts: Facts) -> Listener | None:
    chosen = gloo_choice(facts)
    try:
        return None if chosen is None else Listener(chosen.address)
    except OSError:
        return None
