"""Vectors of many texts in a Parquet file: what `polyformer embed` does."""
