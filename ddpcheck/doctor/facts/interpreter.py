"""Version, path and start-up flags of the Python interpreter.

Standard library only: this file is also run as a script in another Python, which may not have ddpcheck.
"""

from __future__ import annotations

import platform
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_FLAGS = ("isolated", "ignore_environment", "no_site", "safe_path", "optimize")


def interpreter_facts() -> dict[str, Any]:
    return {
        "version": platform.python_version(),
        "implementation": platform.python_implementation(),
        "executable": sys.executable,
        "flags": {name: int(getattr(sys.flags, name, 0)) for name in _FLAGS},
    }


if __name__ == "__main__":
    import json

    sys.stdout.write(json.dumps(interpreter_facts()))
