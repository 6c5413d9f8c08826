"""Per-attempt aggregate of all records, distributed to collectors."""
