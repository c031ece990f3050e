"""The commands of `polyformer`, one file each: a docstring (its help), `Options`, `EXAMPLES` and `run`."""
