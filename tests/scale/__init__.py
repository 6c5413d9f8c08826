"""Generates run folders of many ranks from a real run of a few, to test reports at scale."""
