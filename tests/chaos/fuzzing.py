def fuzz(files, seed, results, seconds, keep):
    pass
