"""The records of a run, which rank 0 writes: the console, train.log, and the loggers, which share a
base class.
"""
