"""Observers: one file per watcher of a training. Training emits events and imports none of them."""
