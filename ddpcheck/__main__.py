"""The entry point. Prints all errors for users."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ddpcheck.errors import UserError


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its status."""
    from ddpcheck.cli.app import app

    try:
        app(args=arguments, prog_name="ddpcheck")
    except UserError as error:
        from ddpcheck.reports.safe_text import safe_line

        sys.stderr.write(f"ddpcheck: {safe_line(error)}\n")
        sys.exit(error.exit_status)


if __name__ == "__main__":
    main()
