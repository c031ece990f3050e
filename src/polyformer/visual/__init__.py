"""Models made visible."""
