"""Gymnasium environments by their ids, and recording of episodes in them."""
