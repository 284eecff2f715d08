"""Small helpers that stand on nothing else."""
