"""The course of a job step by step, in lines for drawing: what report.json has no room for."""
