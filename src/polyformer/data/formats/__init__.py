"""Formats: readers of files, the roles of their columns, and guesses about both."""
