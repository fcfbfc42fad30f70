"""Live runs of the seeds' policies on lanes of one GPU, or on devices of cores."""
