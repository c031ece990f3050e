"""One training on several processes: how they divide data, weights, heads, texts and layers among them."""
