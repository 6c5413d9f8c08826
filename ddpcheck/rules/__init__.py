"""The rules, one a file: each looks at a run's data and returns findings."""
