"""Gymnasium's environments by their ids, and episodes recorded in them."""
