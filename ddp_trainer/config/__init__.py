"""The config: dataclasses with a type and rules for each key, filled in by Hydra, without torch."""
