"""Choices of the fastest way on this machine: measured once and cached, the same for every run.

A `Section` holds the choices of one part of the library: the library that computes a product, or the number
of queries in a tile. It is measured when first needed, in a fraction of a second, and cached by processor,
threads and versions. `POLYFORMER_TUNING` pins all sections: "fixed" to the choices in the code, a file name
to the output of `polyformer tune --out FILE`. Different choices round differently: a training run records its
choices and resumes with them.
"""

from polyformer.core.ops.tuning.section import Section, adopted, recorded

__all__ = ["Section", "adopted", "recorded"]
