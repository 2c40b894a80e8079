"""Measurements of each rank during training: its own times and memory, and the slowest rank."""
