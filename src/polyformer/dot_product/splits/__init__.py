"""Calls of `attend` that cost less as several: by document, by head, by residue class of the slots."""
