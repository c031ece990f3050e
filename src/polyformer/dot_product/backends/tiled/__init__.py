"""Exact attention over the keys of a layout, tile by tile: any pattern, any device, forward and backward."""
