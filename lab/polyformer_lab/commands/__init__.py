"""The commands that the laboratory adds to `polyformer`: `bench` and `reproduce`."""
