"""Rows of token ids: packing, masks, noise and pairs, and batches of rows in an order that resumes."""
