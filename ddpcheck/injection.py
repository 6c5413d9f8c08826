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

DDP_MODULE = "torch.nn.parallel.distributed"
TORCH = "torch"
# Times at which this module was armed, and at which the import of torch began and ended.
CLOCK: dict[str, float] = {}
OLDEST_PYTHON = (3, 10)


def arm() -> None:
    """Install the agent when the DDP module is imported, or now if it already is. Repeated calls have no effect."""
    if any(isinstance(finder, DdpImportFinder) for finder in sys.meta_path):
        return
    CLOCK.setdefault("armed", time.time())
    if DDP_MODULE in sys.modules:
        _install_agent()
    else:
        sys.meta_path.insert(0, DdpImportFinder())


class DdpImportFinder:
    """Meta path finder that returns the usual specs of two modules and observes their import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in (TORCH, DDP_MODULE):
            return None
        spec = self._find_regular_spec(name, path, target)
        try:
            if spec is not None:
                self._observe_import(
                    spec, self._on_torch_imported if name == TORCH else self._on_ddp_imported
                )
                if name == TORCH:
                    CLOCK["torch"] = time.time()
        except Exception as error:
            write_fault("find_spec", error)
        return spec

    def _find_regular_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            if isinstance(finder, DdpImportFinder) or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                return spec
        return None

    def _observe_import(self, spec: ModuleSpec, then: Callable[[], None]) -> None:
        # This sets an attribute on the loader object instead of replacing the loader, so that the module keeps its
        # usual loader, spec and file, also for callers that only look up the spec.
        loader = spec.loader
        original = getattr(loader, "exec_module", None)
        if loader is None or original is None:
            raise TypeError(f"cannot observe the import by {loader!r}")

        def exec_module(module: ModuleType) -> None:
            # Other code may have wrapped it again in the meantime.
            if vars(loader).get("exec_module") is exec_module:
                del loader.exec_module
            original(module)
            then()

        loader.exec_module = exec_module  # type: ignore[method-assign]

    def _on_torch_imported(self) -> None:
        CLOCK["torch_imported"] = time.time()

    def _on_ddp_imported(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        _install_agent()


class LaterImportFinder(DdpImportFinder):
    """Observes the import of one further module, from the agent on."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        spec = self._find_regular_spec(name, path, target)
        try:
            if spec is not None:
                self._observe_import(spec, self._on_imported)
        except Exception as error:
            write_fault("find_spec", error)
        return spec

    def _on_imported(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        self._then()


def _install_agent() -> None:
    """Install the agent. No error in it reaches the user's import."""
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
    """Report a fault of a process that has no record file. An error in this function is ignored."""
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
    except OSError as failed:
        _report_on_stderr(failed)
    except Exception:
        return


_REPORTED: list[str] = []


def _report_on_stderr(error: OSError) -> None:
    """Once, in a rank that cannot write to the run folder: its launcher may see nothing of it."""
    reason = error.strerror or type(error).__name__
    if _REPORTED or not sys.stderr:
        return
    _REPORTED.append(reason)
    folder = os.path.dirname(error.filename or "")
    try:
        sys.stderr.write(
            f"ddpcheck: this process cannot write to the run folder {folder} ({reason}) and is not checked. "
            f"In a container, mount that folder at the same path: -v {folder}:{folder}\n"
        )
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
