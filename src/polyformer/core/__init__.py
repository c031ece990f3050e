"""The basis of all other packages: configuration, registries, states, files, limits and errors."""

__version__ = "0.1.0"
