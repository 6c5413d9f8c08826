"""What tests need besides pytest: hosts made of namespaces, and NVML without a GPU."""
