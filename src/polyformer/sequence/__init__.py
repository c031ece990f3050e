"""Where the tokens of a call stand: slots, positions, documents, padding."""
