"""Image files: index, decoding and cache, as a data set of crops."""
