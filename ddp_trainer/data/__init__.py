"""Data sets, the order of their samples, augmentation and loaders."""
