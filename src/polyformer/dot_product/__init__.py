"""Dot-product attention, softmax(q k^T) v, over any pattern and score function: `attend` and its backends."""
