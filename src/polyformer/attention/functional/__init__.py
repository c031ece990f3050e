"""Dot-product attention, softmax(q k^T) v, for any pattern and score function: `attend` and its backends."""
