"""Data sets, the order of their samples, augmentation, and the loaders that make batches
of them.
"""
