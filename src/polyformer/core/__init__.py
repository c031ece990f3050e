"""The basis of all other packages: configuration, registries, states, files, limits and errors."""
