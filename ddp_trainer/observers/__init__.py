"""Observers, whose methods the package `training` calls at events, without importing them."""
