"""`python -m ddpcheck.links` under any launcher: one rank of the measurement."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from ddpcheck.doctor.facts.record import rank_numbers
from ddpcheck.links.options import DEFAULT_SIZES, check_seconds, check_tolerance, failure_file, parse_sizes

SLOW = 10
# These send tensors in host memory.
_HOST_BACKENDS = ("gloo", "mpi")


def main() -> int:
    """Returns 10 if a link is slow; torchrun itself then exits with 1."""
    options = _options()
    import torch

    from ddpcheck.links.measure import SurveyOptions, survey
    from ddpcheck.links.model import render_links

    distributed: Any = torch.distributed
    device = _begin(options.backend, Path(options.json) if options.exit_zero else None)
    report = survey(SurveyOptions(options.sizes, options.seconds, options.tolerance), device)
    if options.json and _is_first_here(report.nodes):
        _write(Path(options.json), report.to_json())
    if distributed.get_rank() == 0 and not options.quiet:
        encoding = (sys.stdout.encoding or "").lower()
        sys.stdout.write(render_links(report, ascii_only=not encoding.startswith("utf")))
        sys.stdout.flush()
    distributed.destroy_process_group()
    return SLOW if report.slow and not options.exit_zero else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m ddpcheck.links", description=__doc__)
    parser.add_argument("--sizes", type=_checked(parse_sizes), default=DEFAULT_SIZES)
    parser.add_argument("--seconds", type=_checked(lambda text: check_seconds(float(text))), default=2.0)
    parser.add_argument("--tolerance", type=_checked(lambda text: check_tolerance(float(text))), default=1.5)
    parser.add_argument("--backend", default="")
    parser.add_argument("--json", default="links.json", help="written by the first rank of each node")
    parser.add_argument("--quiet", action="store_true", help="print nothing")
    parser.add_argument("--exit-zero", action="store_true", help="exit with 0 even if a link is slow")
    return parser.parse_args()


def _checked(parse: Any) -> Any:
    def checked(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked


def _begin(backend: str, result: Path | None) -> str:
    """Join the process group. Returns the device of the messages.

    If it cannot be joined, `ddpcheck links` finds the reason beside `result`, and the rank ends with 0: launchers
    answer another status with a traceback of their own, which hides the reason.
    """
    import torch

    from ddpcheck.device_api import available_api, default_backend

    distributed: Any = torch.distributed
    # Set the variables of torchrun from those of other launchers.
    for name, number in rank_numbers(os.environ).items():
        if number is not None:
            os.environ[name.upper()] = str(number)
    api = available_api() if backend not in _HOST_BACKENDS else None
    if api is not None:
        api.set_device(int(os.environ.get("LOCAL_RANK", "0")) % api.count())
        backend = backend or default_backend(api.type)
    try:
        distributed.init_process_group(backend or "gloo")
    except (RuntimeError, ValueError) as error:
        reason = f"the backend {backend or 'gloo'!r} cannot be used here: {error}"
        if result is not None:
            failure_file(result).write_text(reason)
            raise SystemExit(0) from None
        # The other ranks meet the same.
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"ddpcheck: {reason}\n")
        raise SystemExit(2) from None
    return api.type if api is not None else "cpu"


def _is_first_here(nodes: Any) -> bool:
    import torch

    distributed: Any = torch.distributed
    return any(distributed.get_rank() == node.ranks[0] for node in nodes)


def _write(path: Path, text: str) -> None:
    """Write atomically: other processes may wait for the file."""
    temporary = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
    temporary.write_text(text)
    os.replace(temporary, path)


if __name__ == "__main__":
    sys.exit(main())
