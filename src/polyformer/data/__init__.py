"""From text to batches: sources -> tokenizer -> packed or paired rows -> corruptions -> batches.

splits = load(DataConfig(path="notes.txt"), needs=("text",))                  # rows of plain values
texts = splits.train["text"]
tokenizer = build_tokenizer(TokenizerConfig(vocab_size=8192), texts)
rows = list(pack(tokenizer.encode_batch(texts), length=256))                  # rows of token ids
batches = Batches(rows, partial(by_rows, batch_size=32), Collate(tokenizer.pad_id), seed=1)
for position, batch in batches.epoch(0): ...                                  # tensors; `position` resumes
"""

from polyformer.data.rows import (
    Batches,
    Collate,
    Position,
    Stream,
    by_rows,
    by_tokens,
    padding_share,
)
from polyformer.data.rows.masking import Masking, MaskingConfig, mask_tokens, sentence_ends, word_starts
from polyformer.data.rows.noising import NoiseConfig, apply_noises, corrupt_spans, text_length
from polyformer.data.rows.packing import pack
from polyformer.data.rows.structured import (
    next_sentence_pairs,
    pair_row,
    sentence_order_pairs,
    translation_row,
)
from polyformer.data.sources.libraries import default_documents
from polyformer.data.sources.splits import DataConfig, Splits, load, read
from polyformer.data.tokenizers import build_tokenizer, load_tokenizer
from polyformer.data.tokenizers.tokenizer import Tokenizer, TokenizerConfig

__all__ = [
    "Batches",
    "Collate",
    "DataConfig",
    "Masking",
    "MaskingConfig",
    "NoiseConfig",
    "Position",
    "Splits",
    "Stream",
    "Tokenizer",
    "TokenizerConfig",
    "apply_noises",
    "build_tokenizer",
    "by_rows",
    "by_tokens",
    "corrupt_spans",
    "default_documents",
    "load",
    "load_tokenizer",
    "mask_tokens",
    "next_sentence_pairs",
    "pack",
    "padding_share",
    "pair_row",
    "read",
    "sentence_ends",
    "sentence_order_pairs",
    "text_length",
    "translation_row",
    "word_starts",
]
