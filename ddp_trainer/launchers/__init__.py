"""Starts jobs: writes the config of a job to a file, checks the nodes, runs torchrun; also runs
sweeps of jobs.
"""
