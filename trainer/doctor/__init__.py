"""What a machine, or a cluster, can do for a run, found out before the run does."""
