"""The config: typed schemas with their rules, composed by Hydra. Imports no torch."""
