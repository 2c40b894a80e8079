"""The records of a run: loggers behind one base class, the console and train.log. Rank 0 writes."""
