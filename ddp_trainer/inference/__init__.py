"""Trained models after their training: loaded from a run directory, asked about images, and exported."""
