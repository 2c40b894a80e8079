"""The data sets, one file each: ``build_x(config) -> Datasets``."""
