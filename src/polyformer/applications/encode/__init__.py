"""Vectors of many texts in a Parquet file: the implementation of `polyformer embed`."""
