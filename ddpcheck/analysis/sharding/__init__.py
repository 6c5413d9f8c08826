"""Shards of parameters: where they are on the device mesh, and the settings that ranks must have in common."""
