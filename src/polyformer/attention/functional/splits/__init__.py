"""Splits of a call of `attend` into cheaper calls: by document, by head, by residue class of the slots."""
