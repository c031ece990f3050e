"""Our attention in the layers of transformers' own models, for any model that dispatches."""
