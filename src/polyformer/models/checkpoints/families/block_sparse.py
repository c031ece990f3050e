"""The attention of BigBird's encoders: full, or a window, first, last and random blocks. Zaheer et al. 2020.

transformers draws random blocks only in training. In evaluation it reads the first block instead of each
random block, though the query attends to that block already; here random blocks are drawn in both modes, and
no key counts twice. So outputs are equal for full attention and for texts within the window and the random
blocks. For long texts they are equal if both have the same random blocks, and the text is unpadded and a
whole number of blocks: transformers' blocks belong to the padded row, ours to each text.
"""

import re
from typing import ClassVar

from polyformer.core.errors import InputError, quote
from polyformer.models.checkpoints.config_mapping import Tree, get_path, set_path
from polyformer.models.checkpoints.tables import FamilyTables
from polyformer.models.presets.bigbird import bigbird_pattern

PATTERN = "encoder.attention.mechanism.pattern"


class BlockSparseFamily(FamilyTables):
    """The options of a family in which `attention_type` selects the pattern of the encoder."""

    other_options: ClassVar = {"attention_type": "block_sparse", "block_size": 64, "num_random_blocks": 3}

    def check(self, hub: Tree) -> None:
        """Raise `InputError` also for unknown attention, and for blocks without random blocks."""
        super().check(hub)
        kind = hub["attention_type"]
        if kind not in ("block_sparse", "original_full"):
            raise InputError(
                f"config.json: attention_type is {quote(kind)}, expected 'block_sparse' or 'original_full'"
            )
        if kind == "block_sparse" and hub["num_random_blocks"] < 1:
            raise InputError("config.json: num_random_blocks is 0, expected 1 or more, as transformers does")

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the pattern; none for full attention."""
        pattern = None
        if hub["attention_type"] == "block_sparse":
            layers = tree["encoder"]["num_hidden_layers"]
            block, random = hub["block_size"], hub["num_random_blocks"]
            pattern = bigbird_pattern(layers, block, random).to_text()
        set_path(tree, PATTERN, pattern)

    def write_other_options(self, tree: Tree) -> Tree:
        """Return the options of the pattern, which is parsed as text; none without an encoder."""
        if tree["encoder"] is None:
            return {}
        text = get_path(tree, PATTERN)
        if text is None:
            return {"attention_type": "original_full"}
        # A pattern is text in our trees.
        block = re.search(r"BlockWindow\(size=(\d+)", text)
        random = re.search(r"Random\(blocks=(\d+)", text)
        return {
            "attention_type": "block_sparse",
            "block_size": int(block[1]) if block else 64,
            "num_random_blocks": int(random[1]) if random else 3,
        }
