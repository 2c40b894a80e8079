"""Starts jobs: writes job files, checks the nodes, runs torchrun, and runs sweeps of jobs."""
