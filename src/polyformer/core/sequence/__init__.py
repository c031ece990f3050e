"""The tokens of a call: slots, positions, documents, padding."""
