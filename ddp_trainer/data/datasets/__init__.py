"""The data sets. Each is built by a function ``build_x(config) -> Datasets``."""
