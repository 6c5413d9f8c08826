"""What ranks said step by step, kept small however long the job ran."""
