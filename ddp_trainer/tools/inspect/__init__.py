"""Examines a data set before training: damaged files, copies, and suspected wrong labels."""
