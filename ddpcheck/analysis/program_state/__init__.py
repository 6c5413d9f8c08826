"""The state in which ranks train: modes, settings and precision, and what their backwards start from."""
