"""Models of a few thousand parameters in float64, with weights large enough that their texts vary."""

import torch

from polyformer import create_model
from polyformer.models.architectures import Transformer
from polyformer.models.config import SpecialTokens

VOCAB, PAD, BOS, EOS = 13, 0, 1, 2
SPECIAL = SpecialTokens(pad=PAD, bos=BOS, eos=EOS)


def decoder(seed: int = 0, special: SpecialTokens = SPECIAL) -> Transformer:
    """A decoder alone, with 40 learned positions."""
    return _made("decoder-tiny", seed, special, max_position_embeddings=40, initializer_range=0.8)


def pair(seed: int = 0, special: SpecialTokens = SPECIAL) -> Transformer:
    """An encoder-decoder with sinusoids."""
    return _made("transformer-tiny", seed, special, initializer_range=0.8, block="pre")


FAMILIES = {"decoder": decoder, "pair": pair}


def prompts(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    """Ordinary tokens [rows, length]."""
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def left_padded(texts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask [B, T] of texts [T_i]."""
    width = max(len(text) for text in texts)
    ids = torch.stack([torch.cat([text.new_full((width - len(text),), PAD), text]) for text in texts])
    return ids, torch.stack([torch.arange(width) >= width - len(text) for text in texts]).long()


@torch.no_grad()
def next_log_probabilities(model: Transformer, prompt: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """log P of the next token [V] after `tokens`, from the whole text at once: no cache, no batch."""
    new = prompt.new_tensor(tokens).view(1, -1)
    if model.encoder is None:
        out = model(torch.cat([prompt.view(1, -1), new], 1))
    else:
        start = prompt.new_full((1, 1), BOS)
        out = model(prompt.view(1, -1), decoder_input_ids=torch.cat([start, new], 1))
    return out.logits[0, -1].log_softmax(-1)


def _made(preset: str, seed: int, special: SpecialTokens, **options: object) -> Transformer:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = create_model(
            preset,
            vocab_size=VOCAB,
            hidden_size=12,
            num_attention_heads=2,
            intermediate_size=24,
            special=special,
            tied=False,
            **options,
        )
        model.head.weight.data[EOS] *= 1.5  # likely often, unlikely often
    return model.double().eval()
