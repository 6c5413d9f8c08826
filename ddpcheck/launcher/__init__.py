"""Starts the user's command, monitors the ranks of this node, and ends every process that the job leaves behind."""
