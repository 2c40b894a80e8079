"""Checkpoints that a crash cannot destroy, and the run directory that holds them."""
