"""Text in, batches out: sources -> tokenizer -> packed or paired rows -> corruptions -> batches.

splits = load(DataConfig(path="notes.txt"), needs=("text",))                  # rows of plain values
texts = splits.train["text"]
tokenizer = Tokenizer.build(TokenizerConfig(vocab_size=8192), texts)
rows = list(pack(tokenizer.encode_batch(texts), length=256))                  # rows of token ids
batches = Batches(rows, partial(by_rows, batch_size=32), Collate(tokenizer.pad_id), seed=1)
for position, batch in batches.epoch(0): ...                                  # tensors; `position` resumes
"""

from polyformer.data.batching import Batches, Collate, Position, Stream, by_rows, by_tokens, padding_share
from polyformer.data.default_text import default_documents
from polyformer.data.masked_rows import Masking, MaskingConfig
from polyformer.data.masking import mask_tokens
from polyformer.data.packing import pack
from polyformer.data.sources import DataConfig, Splits, load, read
from polyformer.data.tokenizer import Tokenizer, TokenizerConfig

__all__ = [
    "Batches",
    "Collate",
    "DataConfig",
    "Masking",
    "MaskingConfig",
    "Position",
    "Splits",
    "Stream",
    "Tokenizer",
    "TokenizerConfig",
    "by_rows",
    "by_tokens",
    "default_documents",
    "load",
    "mask_tokens",
    "pack",
    "padding_share",
    "read",
]
