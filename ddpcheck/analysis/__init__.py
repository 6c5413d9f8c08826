"""Analysis: from records to findings and a finished report. Nothing is rendered here."""
