"""Old place of the NVML stand-in; it is now in tests.helpers.nvml."""

from tests.helpers import nvml as nvml
