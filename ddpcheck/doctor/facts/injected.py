"""Whether ddpcheck was injected into this interpreter, and what may have blocked it.

Standard library only: this file is also run as a script, in any Python that a job may use.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_BLOCKING_FLAGS = ("isolated", "ignore_environment", "no_site")


def injection_state(folder: str) -> dict[str, Any]:
    """Call before torch is imported. `folder` is the one that ddpcheck puts first on PYTHONPATH."""
    first = os.environ.get("PYTHONPATH", "").split(os.pathsep)[0]
    return {
        "armed": any(type(finder).__name__ == "DdpImportFinder" for finder in sys.meta_path),
        "first_on_path": first == folder,
        "sitecustomize": getattr(sys.modules.get("sitecustomize"), "__file__", None) or "",
        "flags": [name for name in _BLOCKING_FLAGS if getattr(sys.flags, name, 0)],
    }


if __name__ == "__main__":
    import json

    sys.stdout.write(json.dumps(injection_state(os.environ.get("DDPCHECK_DOCTOR_TRIAL", ""))))
