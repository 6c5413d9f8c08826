"""A script with `import ddpcheck.auto`: run by a launcher as a rank, or as the parent of its ranks."""

from __future__ import annotations

import os
import sys

import ddpcheck.auto  # noqa: F401

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))


if __name__ == "__main__":
    if "RANK" in os.environ:
        import by_environment

        by_environment.main()
    else:
        import by_multiprocessing

        by_multiprocessing.main(sys.argv[1])
