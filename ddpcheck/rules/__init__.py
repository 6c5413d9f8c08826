"""The rules, one per file: each examines the data of a run and returns findings."""
