"""Claims of the literature CPU-sized: one module each, with a config and `run(config)`."""
