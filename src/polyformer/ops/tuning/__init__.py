"""What is fastest on this machine: measured once, kept in the user's cache folder, the same for every run.

A `Section` holds the choices of one part of the library: which library computes a product, how many queries a
tile has. It is measured when first asked for, in a fraction of a second, and kept by processor, threads and
versions. `POLYFORMER_TUNING` pins all sections: "fixed" to the choices written in the code, a file's name to
what `polyformer tune --out FILE` wrote into it. Different choices round differently: a training run records
the ones it was made with and goes on with them.
"""

from polyformer.ops.tuning.section import Section, adopted, recorded

__all__ = ["Section", "adopted", "recorded"]
