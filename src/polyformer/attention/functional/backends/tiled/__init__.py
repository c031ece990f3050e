"""Exact attention over the keys of a layout, tile by tile, for any pattern and device, with gradients."""
