"""`python -m tests.corpus`."""

import sys

from tests.corpus.run import main

sys.exit(main())
