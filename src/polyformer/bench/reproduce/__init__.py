"""Claims of the literature at desk scale: one module each, with a config and `run(config)`."""
