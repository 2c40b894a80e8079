"""Performance: the time of a step by phase, utilization, the cost of communication, and a model of
the step time.
"""
