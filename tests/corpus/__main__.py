"""`python -m tests.corpus`."""

import sys

from tests.corpus.run import command

sys.exit(command())
