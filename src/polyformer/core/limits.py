"""Limits of input sizes and of requested sizes. SECURITY.md shows `LIMITS` as a table.

They are far above the needs of honest files and users, and low enough that a small file, or a number on the
command line, cannot exhaust memory or time. Each is checked before anything of that size is allocated.
"""

JSON_BYTES = 2**28  # vocabularies are large
YAML_BYTES, EXPRESSION_BYTES = 2**18, 2**16
DEPTH = 64
EXPRESSION_DEPTH = 2 * DEPTH
PARTS = 1024
INTEGER_BITS = 64

SIZE = 2**24
"""The limit of a width, a vocabulary, a number of positions, heads, ...: products of a few sizes fit into 64
bits.
"""

LAYERS = 4096
PATTERN_NUMBER = 2**31 - 1
"""Chosen so that the product of two also fits into 64 bits."""

NEW_TOKENS = 2**20
"""The most new tokens of a text: at ten tokens per second they take more than a day."""

RESERVED = 2**14
"""The most tokens for which a KV cache reserves memory at once; beyond that it grows with the tokens."""

TEXTS = 4096
"""Texts generated at once for one input: beams or samples."""

COUNT = 2**63 - 1
"""The limit of a number that only ends a loop, such as training steps, and of seeds."""

CELLS = 2**14
"""The most runs of an experiment: in a YAML text of 256 KiB the axes of a grid can multiply to any number."""

QUOTED, MESSAGE = 200, 2000
LINE = 2**26
FILE_OF_A_LABEL = 2**24
PIXELS, IMAGE_BYTES, IMAGE_SIDE = 2**26, 2**28, 4096
LABELS = 2**26
"""The most labels in an IDX file. They are read at once, a byte each; MNIST has a thousandth of this."""

EXPANSION, EXPANDED = 200, 2**26
"""Text compresses to a fifth or a tenth; data that is 200 times its file, and large, is a
decompression bomb.
"""

VECTOR_WIDTH, VECTOR_WORD = 2**16, 2**12


def _size(count: int) -> str:
    """Return a number of bytes in KiB or MiB."""
    return f"{count // 2**20} MiB" if count >= 2**20 else f"{count // 2**10} KiB"


LIMITS = {
    "a JSON file": _size(JSON_BYTES),
    "a YAML text": _size(YAML_BYTES),
    "an expression": _size(EXPRESSION_BYTES),
    "nesting in JSON and YAML": f"{DEPTH} levels",
    "nesting in an expression": f"{EXPRESSION_DEPTH} nodes",
    "calls and names of layers in `polyformer_attention` of a config.json": f"{PARTS:,}",
    "an integer in a file": f"{INTEGER_BITS} bits",
    "a float in a file": "finite",
    "a key in a JSON object": "once",
    "a size in a configuration (positions, widths, vocabulary)": f"{SIZE:,}",
    "layers of a stack, also in a GGUF file": f"{LAYERS:,}",
    "a number in a pattern": f"{PATTERN_NUMBER:,}",
    "new tokens of a text (`--max-new-tokens`, `--generate`, `GenerationConfig`)": f"{NEW_TOKENS:,}",
    "beams or samples per input": f"{TEXTS:,}",
    "any other size on the command line (`--lengths`, `--num-beams`, `--batch-tokens`, ...)": f"{SIZE:,}",
    "runs of an experiment (the labels of all axes times the seeds)": f"{CELLS:,}",
    "a value quoted in a message": f"{QUOTED} characters",
    "a message": f"{MESSAGE:,} characters",
    "a line of text": f"{LINE:,} characters",
    "a text in a folder of labels": f"{FILE_OF_A_LABEL:,} characters",
    "the file of an image": _size(IMAGE_BYTES),
    "pixels of an image": f"{PIXELS:,}",
    "labels of an IDX file": f"{LABELS:,}",
    "decompressed data of a gzip, zstd, npz or Parquet file": (
        f"{EXPANSION} times the file, or {_size(EXPANDED)} if larger"
    ),
    "dimensions of a word vector": f"{VECTOR_WIDTH:,}",
}
"""The limited sizes and their limits."""


def limit_table() -> str:
    """Return `LIMITS` as a Markdown table."""
    return "\n".join(
        ["| input | limit |", "|---|---|", *(f"| {what} | {most} |" for what, most in LIMITS.items())]
    )
