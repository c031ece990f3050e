"""A tiny chat model with random weights: its folder as on the hub, with a tokenizer and a chat template."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken

from chat_templates import CHATML
from polyformer.data import Tokenizer, TokenizerConfig
from polyformer.data.chat import ChatTemplate
from polyformer.models.presets import create_model

TEXT = [f"Anna and Tom flew from Paris to Oslo, {i} of them twice; a fine, funny film." for i in range(40)]
TINY = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
TURNS = "<|im_start|>", "<|im_end|>"


def chat_tokenizer(template: str | None = CHATML) -> Tokenizer:
    """Byte-level BPE with the tokens of ChatML."""
    trained = Tokenizer.train(TokenizerConfig(vocab_size=300), TEXT)
    trained.backend.add_special_tokens([AddedToken(name, special=True) for name in TURNS])
    tokenizer = Tokenizer(trained.backend)
    tokenizer.chat = None if template is None else ChatTemplate({"default": template})
    return tokenizer


def chat_folder(
    folder: Path,
    preset: str = "llama-7b",
    template: str | None = CHATML,
    generation: dict[str, Any] | None = None,
    **options: Any,
) -> Path:
    """A model whose replies are random, but end: at <|im_end|>, or as `generation` says."""
    tokenizer = chat_tokenizer(template)
    torch.manual_seed(0)
    sizes = {"num_key_value_heads": 1} if preset.startswith("llama") else {}  # first: a divisor of any
    model = create_model(preset, vocab_size=len(tokenizer), **sizes, **TINY, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # norms stay as they are
                parameter.normal_(std=0.3)
    model.save_pretrained(folder, format="hub")
    tokenizer.save(folder)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder
