"""The table of members: one tiny model per member, and the questions that it learns to answer."""
