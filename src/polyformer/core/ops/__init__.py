"""Numerical operations: products, norms, activations, dropout, losses, threads and precision."""
