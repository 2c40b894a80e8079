"""The loggers, which rank 0 calls with the records of a run."""
