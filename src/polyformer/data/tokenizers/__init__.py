"""Tokenizers: training, loading from files of several origins, and conversion between text and ids."""
