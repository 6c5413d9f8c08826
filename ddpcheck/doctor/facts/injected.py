"""Whether ddpcheck has got into this very interpreter, and what may have kept it out.

Standard library only, and runs as a script too: in any Python that a job might be started with.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_KEEPS_OUT = ("isolated", "ignore_environment", "no_site")


def look(folder: str) -> dict[str, Any]:
    """`folder` is the one that ddpcheck put first on PYTHONPATH. Only for a moment before torch is imported."""
    first = os.environ.get("PYTHONPATH", "").split(os.pathsep)[0]
    return {
        "armed": any(type(finder).__name__ == "DdpImportFinder" for finder in sys.meta_path),
        "first_on_path": first == folder,
        "sitecustomize": getattr(sys.modules.get("sitecustomize"), "__file__", None) or "",
        "flags": [name for name in _KEEPS_OUT if getattr(sys.flags, name, 0)],
    }


if __name__ == "__main__":
    import json

    sys.stdout.write(json.dumps(look(os.environ.get("DDPCHECK_DOCTOR_TRIAL", ""))))
