"""Modules that several tests share: running commands, reading runs, a browser, a terminal, NVML without a GPU."""
