"""From text to batches: sources -> tokenizer -> packed or paired rows -> corruptions -> batches.

splits = load(DataConfig(path="notes.txt"), needs=("text",))                  # rows of plain values
texts = splits.train["text"]
tokenizer = build_tokenizer(TokenizerConfig(vocab_size=8192), texts)
rows = list(pack(tokenizer.encode_batch(texts), length=256))                  # rows of token ids
batches = Batches(rows, partial(by_rows, batch_size=32), Collate(tokenizer.pad_id), seed=1)
for position, batch in batches.epoch(0): ...                                  # tensors; `position` resumes
"""

from polyformer.data.batching import Batches, Collate, Position, Stream, by_rows, by_tokens, padding_share
from polyformer.data.library_text import default_documents
from polyformer.data.masking import Masking, MaskingConfig, mask_tokens
from polyformer.data.noising import NoiseConfig, apply_noises
from polyformer.data.packing import pack
from polyformer.data.pairs import pair_row, translation_row
from polyformer.data.sentence_pairs import next_sentence_pairs, sentence_order_pairs
from polyformer.data.sources import DataConfig, Splits, load, read
from polyformer.data.spans import corrupt_spans, text_length
from polyformer.data.tokenizer import Tokenizer, TokenizerConfig
from polyformer.data.tokenizer_loading import build_tokenizer, load_tokenizer
from polyformer.data.word_boundaries import sentence_ends, word_starts

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
