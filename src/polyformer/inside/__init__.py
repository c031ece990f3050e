"""Inside transformers: its own models, any that dispatch, with our attention in their layers."""
