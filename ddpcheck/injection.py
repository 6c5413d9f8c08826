"""Waits until torch's DDP module is imported, then installs the agent.

Standard library only, and little of it: this is imported at the start of every Python process of a job.
"""

from __future__ import annotations

import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

WATCHED = "torch.nn.parallel.distributed"
TORCH = "torch"
# When this interpreter came to us, and when it began and finished to import torch: the start-up's first marks.
CLOCK: dict[str, float] = {}
OLDEST_PYTHON = (3, 10)


def arm() -> None:
    """Install the agent when the DDP module is imported, or now if it already is. Safe to repeat."""
    if any(isinstance(finder, DdpImportFinder) for finder in sys.meta_path):
        return
    CLOCK.setdefault("armed", time.time())
    if WATCHED in sys.modules:
        _let_agent_in()
    else:
        sys.meta_path.insert(0, DdpImportFinder())


class DdpImportFinder:
    """Meta path finder that returns the usual specs of two modules and observes their import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in (TORCH, WATCHED):
            return None
        spec = self._find_as_without_us(name, path, target)
        try:
            if spec is not None:
                self._listen(spec, self._torch_there if name == TORCH else self._ddp_there)
                if name == TORCH:
                    CLOCK["torch"] = time.time()
        except Exception as error:
            write_fault("find_spec", error)
        return spec

    def _find_as_without_us(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            if isinstance(finder, DdpImportFinder) or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                return spec
        return None

    def _listen(self, spec: ModuleSpec, then: Callable[[], None]) -> None:
        # An attribute on this one loader object rather than a loader of our own: the module keeps the
        # loader, spec and file it would have had, and so does whoever only asks where it is.
        loader = spec.loader
        original = getattr(loader, "exec_module", None)
        if loader is None or original is None:
            raise TypeError(f"cannot listen to {loader!r}")

        def exec_module(module: ModuleType) -> None:
            # Unless it was wrapped once more by somebody else in the meantime.
            if vars(loader).get("exec_module") is exec_module:
                del loader.exec_module
            original(module)
            then()

        loader.exec_module = exec_module  # type: ignore[method-assign]

    def _torch_there(self) -> None:
        CLOCK["torch_there"] = time.time()

    def _ddp_there(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        _let_agent_in()


def _let_agent_in() -> None:
    """Install the agent; no error in here reaches the user's import."""
    try:
        if sys.version_info < OLDEST_PYTHON:
            raise RuntimeError("ddpcheck needs Python 3.10 or newer in the ranks")
        from ddpcheck.agent.install import install

        install()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        write_fault("install", error)


def write_fault(entry: str, error: BaseException) -> None:
    """Write a line about a failed start to the run folder, for the report."""
    write_fault_line("bootstrap", entry, f"{type(error).__name__}: {error}", _where(error))


def write_fault_line(probe: str, entry: str, error: str, where: str, rank: int | None = None) -> None:
    """Report a fault of a process that has no record file; silent if that fails too."""
    try:
        import json

        run_dir = json.loads(os.environ["DDPCHECK_CONFIG"])["run_dir"]
        given = os.environ.get("RANK", "")
        line = {
            "kind": "fault",
            "probe": probe,
            "entry": entry,
            "error": error,
            "where": where,
            "pid": os.getpid(),
            "rank": int(given) if rank is None and given.isdigit() else rank,
        }
        path = os.path.join(run_dir, f"fault-{os.getpid()}.jsonl")
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, json.dumps(line).encode() + b"\n")
        finally:
            os.close(descriptor)
    except Exception:
        return


def _where(error: BaseException) -> str:
    """File, line and function of the innermost frame."""
    trace = error.__traceback__
    if trace is None:
        return ""
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    return f"{code.co_filename}:{trace.tb_lineno} in {code.co_name}"
