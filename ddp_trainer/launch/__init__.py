"""Starts ranks: job files (the config of a job), node check, torchrun with exit code 2 for wrong input, sweeps."""
