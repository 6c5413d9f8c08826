"""Run folders of many ranks, made from those of a few: nobody has 4,096 GPUs to test with."""
