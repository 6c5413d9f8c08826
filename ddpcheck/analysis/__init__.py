"""Analysis: what was recorded goes in, findings and a finished report come out; nothing is rendered here."""
