"""The folder for PYTHONPATH that holds the package `amdsmi`, without a GPU and without ROCm."""
