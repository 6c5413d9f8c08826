"""Rules about parameters, gradients and optimizers (2xx)."""
