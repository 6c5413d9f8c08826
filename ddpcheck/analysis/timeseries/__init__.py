"""Time series over the steps of a job, for charts. Most are too large for report.json."""
