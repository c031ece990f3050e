"""What a processor is asked for: products, norms, activations, dropout, losses, threads and precision."""
