"""Names of special tokens, in this library and in common tokenizers."""

# By role, our name first; <s>, </s>, [CLS] and [SEP] serve two roles if necessary.
NAMES = {
    "pad": ("<pad>", "[PAD]"),
    "unk": ("<unk>", "[UNK]"),
    "bos": ("<s>", "<bos>", "[BOS]", "<|endoftext|>", "[CLS]"),
    "eos": ("</s>", "<eos>", "[EOS]", "<|endoftext|>", "[SEP]"),
    "cls": ("[CLS]", "<cls>", "<s>"),
    "sep": ("[SEP]", "<sep>", "</s>"),
    "mask": ("<mask>", "[MASK]"),
}
# The order in which transformers gives ids to tokens that a vocabulary lacks.
ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_SPECIAL = ("<pad>", "<s>", "</s>", "<mask>")
# Special tokens of tokenizers trained here, with the ids 0, 1, ... (bytes: 256, 257, ...).
SPECIAL_OF = {
    "bytes": _SPECIAL,
    "characters": (*_SPECIAL, "<unk>"),
    "bpe": _SPECIAL,
    "unigram": (*_SPECIAL, "<unk>"),
    "wordpiece": ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
}
BYTES = 256
