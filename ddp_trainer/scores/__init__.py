"""The scores of a model on a split, and their files and pictures."""
