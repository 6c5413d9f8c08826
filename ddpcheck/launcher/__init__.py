"""Starts the user's command, stays out of its way, and sees to it that nothing of it is left behind."""
