"""Whether what a code is about was looked at in a run: nothing found is not the same as nothing looked at."""

from __future__ import annotations

from ddpcheck.analysis.report import Report

# The check, as the report names it, without which a code cannot be raised.
_AFTER_STEP = "parameters after each step"
_APPLIED = "gradients as applied"
_MEAN = "reduced gradients against the mean"
_CHECKS = {
    "DDP101": "parameters after wrapping",
    "DDP103": "parameters after wrapping",
    "DDP201": _AFTER_STEP,
    "DDP202": _APPLIED,
    "DDP203": _MEAN,
    "DDP204": _MEAN,
    "DDP205": _APPLIED,
    "DDP206": "optimizer hyperparameters, scale and step counts",
    "DDP208": _AFTER_STEP,
    "DDP304": _MEAN,
}
_BUFFERS = ("buffers after wrapping", "buffers after each synchronisation")
# These tell of what was not recorded, and can always be raised.
_ABOUT_THE_RUN = "DDP60"
# Parts of the report that hold the figures behind these.
_PARTS = {
    "DDP302": "data",
    "DDP303": "data",
    "DDP401": "overlap",
    "DDP402": "time",
    "DDP403": "links",
    "DDP404": "overlap",
    "DDP405": "traffic",
    "DDP501": "memory",
    "DDP502": "memory",
}


def why_not_looked_at(report: Report, code: str) -> str:
    """The reason in words; empty where it was looked at."""
    if code.startswith(_ABOUT_THE_RUN):
        return ""
    if not report.checks:
        return "too little was recorded"
    if code == "DDP210":
        return "" if any(_compared(report, name) for name in _BUFFERS) else "no buffers were compared"
    if code in _CHECKS:
        return (
            "" if _compared(report, _CHECKS[code]) else f"{_CHECKS[code]}: {_detail(report, _CHECKS[code])}"
        )
    part = _PARTS.get(code)
    return f"nothing about {part} was recorded" if part and not getattr(report, part, None) else ""


def _compared(report: Report, name: str) -> bool:
    return any(check.compared for check in report.checks if check.name == name)


def _detail(report: Report, name: str) -> str:
    return next(
        (check.detail or check.outcome for check in report.checks if check.name == name), "not checked"
    )
