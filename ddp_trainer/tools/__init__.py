"""The use of trained models: load them from a run directory, predict and score images, and export
them.
"""
