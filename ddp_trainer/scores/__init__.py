"""The scores of a model on a split: per sample, per class and per pair of classes; their files and
pictures.
"""
