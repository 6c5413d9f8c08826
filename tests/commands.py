"""Old place of tests.helpers.commands, for benchmarks that still import it."""

from tests.helpers.commands import environment as environment
