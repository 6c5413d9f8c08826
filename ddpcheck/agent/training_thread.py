"""The end of a training function that a scheduler runs in a thread of its worker process, as Ray Train does.

Such a scheduler ends its workers by a signal when the function has returned. The end of the thread is the end of the
rank; the end of the process says nothing.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from ddpcheck.patches import Patches, calling

# Where Ray Train takes the exception of a training function, by version.
_RAY_ERRORS = (
    (
        "ray.train.v2._internal.execution.worker_group.thread_runner",
        "construct_user_exception_with_traceback",
    ),
)
# The function of this name changes the runtime environment of a driver, in `ray.init`.
_RAY_HOOK = "RAY_RUNTIME_ENV_HOOK"
_RAY_THREAD = "TrainingThread("
_RAY_CLASS = "RunnerThread"


def reach_workers_of_ray() -> None:
    """In a driver, let `ray.init` pass our settings on: workers of a cluster that was started earlier are no children.

    Ray may be imported after torch, so what counts is whether it is installed. A rank of another launcher is no driver.
    """
    if "RANK" not in os.environ and ("ray" in sys.modules or find_spec("ray") is not None):
        os.environ.setdefault(_RAY_HOOK, "ddpcheck.ray.runtime_env_hook")


def runs_in_worker_of_ray() -> bool:
    """Whether this thread is the one in which Ray Train calls the training function."""
    thread = threading.current_thread()
    if "ray.train" not in sys.modules or thread is threading.main_thread():
        return False
    return thread.name.startswith(_RAY_THREAD) or type(thread).__name__ == _RAY_CLASS


def watch_end(patches: Patches, raised: Callable[..., None], ended: Callable[[], None]) -> None:
    """Call `ended` when the current thread has ended, and before that `raised` with an exception of its function."""
    thread = threading.current_thread()

    def wait() -> None:
        thread.join()
        ended()

    def error(exception: BaseException, *_: Any, **__: Any) -> None:
        if threading.current_thread() is thread:
            raised(type(exception), exception, exception.__traceback__)

    for module, name in _RAY_ERRORS:
        if hasattr(sys.modules.get(module), name):
            patches.replace(sys.modules[module], name, lambda original: calling(original, error, None))
    # A daemon thread: the exit of the process never waits for it.
    threading.Thread(target=wait, name="ddpcheck-training-thread", daemon=True).start()
