"""Directories as people have them: tiny models with random weights beside the files of a tokenizer."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, processors

from polyformer.data import Tokenizer, TokenizerConfig
from polyformer.data.tokenizers import load_tokenizer
from polyformer.models.presets import create_model
from polyformer.nn.heads import HeadConfig

TEXT = [f"Anna and Tom flew from Paris to Oslo, {i} of them twice; a fine, funny film." for i in range(40)]
TINY = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
LANGUAGES = ("en", "de", "fr")


def bert_files(folder: Path) -> Tokenizer:
    """vocab.txt, as BERT has it."""
    config = TokenizerConfig(algorithm="wordpiece", vocab_size=120, lowercase=True)
    Tokenizer.train(config, TEXT).export(folder)
    return settled(folder, "bert")


def byte_files(folder: Path, model_type: str) -> Tokenizer:
    """vocab.json and merges.txt, as GPT-2, RoBERTa and BART have them."""
    Tokenizer.train(TokenizerConfig(algorithm="bpe", vocab_size=300), TEXT).export(folder)
    vocabulary = json.loads((folder / "vocab.json").read_text())
    vocabulary |= {"<s>": 0, "<pad>": 1}  # RoBERTa's
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    return settled(folder, model_type)


def piece_files(folder: Path, single: str = "$A </s>", languages: tuple[str, ...] = ()) -> Tokenizer:
    """tokenizer.json of T5's kind, or of M2M's with its languages."""
    tokenizer = Tokenizer.train(TokenizerConfig(algorithm="unigram", vocab_size=90), TEXT)
    tokenizer.backend.add_special_tokens(
        [AddedToken(f"__{language}__", special=True) for language in languages]
    )
    names = ["</s>", *(f"__{language}__" for language in languages[:1])]
    ids = [(name, tokenizer.backend.token_to_id(name)) for name in names]
    tokenizer.backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)
    Tokenizer(tokenizer.backend).save(folder)
    return load_tokenizer(folder)


def settled(folder: Path, model_type: str) -> Tokenizer:
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return load_tokenizer(folder)


def save(
    folder: Path,
    preset: str,
    tokenizer: Tokenizer,
    head: HeadConfig | None = None,
    hub: dict[str, Any] | None = None,
    **options: Any,
) -> Path:
    """A tiny `preset` for the tokenizer in `folder`, as on the hub; `hub` is put into config.json."""
    vocabulary = 1 + max(tokenizer.backend.get_vocab(with_added_tokens=True).values())
    own = {} if head is None else {"head": head}
    torch.manual_seed(0)
    model = create_model(preset, vocab_size=vocabulary, **{**TINY, **options}, **own)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # norms stay as they are
                parameter.normal_(std=0.3)
    model.save_pretrained(folder, format="hub")
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**described, **(hub or {})}))
    return folder
