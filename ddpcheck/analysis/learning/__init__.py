"""Which parameters ever change while optimizers step them."""
