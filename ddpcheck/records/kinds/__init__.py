"""Record classes by subject. `ddpcheck.records.registry` imports every module of this package.

Field names and kinds are the file format: they never change. New fields have a default.
Standard library only: these modules are imported inside ranks.
"""
