"""Small models of transformers beside ours with the same weights, in float64: they write varied texts."""

import torch
from torch import nn

from polyformer.models.architectures import Transformer
from polyformer.models.checkpoints import from_transformers
from tolerances import with_exact_waves

VOCAB, PAD, EOS, LENGTH = 31, 0, 2, 7
SPECIAL = {"pad_token_id": PAD, "bos_token_id": EOS, "eos_token_id": EOS}


def twins(name: str) -> tuple[Transformer, nn.Module]:
    """A model of the family `name`, one of `FAMILIES`."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        theirs = FAMILIES[name]().double().eval()
    if name != "t5":
        theirs.get_output_embeddings().weight.data[EOS] *= 1.5  # likely often, unlikely often
    return from_transformers(theirs), theirs


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB,
            n_embd=24,
            n_layer=2,
            n_head=3,
            n_inner=40,
            n_positions=32,
            initializer_range=0.6,
            **SPECIAL,
        )
    )


def gptj() -> nn.Module:
    from transformers import GPTJConfig, GPTJForCausalLM

    model = GPTJForCausalLM(
        GPTJConfig(
            vocab_size=VOCAB,
            n_embd=24,
            n_layer=2,
            n_head=3,
            n_inner=40,
            n_positions=32,
            rotary_dim=4,
            initializer_range=0.3,
            **SPECIAL,
        )
    )
    return with_exact_waves(model)


def bart() -> nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration

    return BartForConditionalGeneration(
        BartConfig(
            vocab_size=VOCAB,
            d_model=24,
            encoder_layers=1,
            decoder_layers=2,
            encoder_attention_heads=3,
            decoder_attention_heads=3,
            encoder_ffn_dim=40,
            decoder_ffn_dim=40,
            max_position_embeddings=32,
            decoder_start_token_id=EOS,
            forced_eos_token_id=None,
            init_std=0.6,
            **SPECIAL,
        )
    )


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCAB,
            d_model=24,
            d_kv=8,
            d_ff=40,
            num_layers=2,
            num_heads=3,
            decoder_start_token_id=PAD,
            initializer_factor=3.0,
            **SPECIAL,
        )
    )
    model.shared.weight.data *= 0.1  # else the last token decides the next
    return model


FAMILIES = {"gpt2": gpt2, "gptj": gptj, "bart": bart, "t5": t5}


def prompts(left: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask [6, 7], some padded on the left, or else on the right.

    transformers' BART would count padding on the left among its positions.
    """
    ids = torch.randint(3, VOCAB, (6, LENGTH), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    for row, padding in enumerate((0, 3, 0, 5, 1, 0)):
        mask[row, :padding] = 0
    mask = mask if left else mask.flip(1)
    return ids.masked_fill(mask == 0, PAD), mask


def texts(tokens: torch.Tensor, eos: tuple[int, ...] = (EOS,)) -> list[list[int]]:
    """What was written up to its end, whatever fills the row after it."""
    result = []
    for row in tokens.tolist():
        ends = [place for place, token in enumerate(row) if token in eos]
        result.append(row[: ends[0] + 1] if ends else row)
    return result
