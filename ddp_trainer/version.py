"""The version of the package, in a module of its own so that any module can import it."""

__version__ = "0.3.0.dev0"
