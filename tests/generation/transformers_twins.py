"""Small models beside transformers' own with the same weights: GPT-2, and BART out of the parts of ours."""

import torch
from torch import nn

from polyformer import create_model
from polyformer.bench.generation import transformers_twin
from polyformer.model import SpecialTokens, Transformer
from polyformer.position import LearnedConfig

VOCAB, PAD, BOS, EOS, LENGTH = 31, 0, 1, 2, 7
ATTENTION = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "out_proj"}


def gpt2_twins() -> tuple[Transformer, nn.Module]:
    """A decoder alone, in float64."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        ours = create_model(
            "gpt2", num_hidden_layers=2, hidden_size=24, num_attention_heads=3, intermediate_size=40,
            vocab_size=VOCAB, max_position_embeddings=32, initializer_range=0.6,
            special=SpecialTokens(pad=PAD, eos=EOS),
        )  # fmt: skip
    return ours.double().eval(), transformers_twin(ours).double().eval()


def bart_twins() -> tuple[Transformer, nn.Module]:
    """An encoder-decoder, in float64."""
    from transformers import BartConfig, BartForConditionalGeneration

    with torch.random.fork_rng():
        torch.manual_seed(5)
        ours = create_model(
            "transformer-tiny", vocab_size=VOCAB, hidden_size=24, num_attention_heads=3, intermediate_size=40,
            activation="gelu", position=LearnedConfig(), max_position_embeddings=32, scaled=False,
            normed=True, initializer_range=0.5, special=SpecialTokens(pad=PAD, bos=EOS, eos=EOS),
        )  # fmt: skip
    theirs = BartForConditionalGeneration(
        BartConfig(
            vocab_size=VOCAB, d_model=24, encoder_layers=1, decoder_layers=1, encoder_attention_heads=3,
            decoder_attention_heads=3, encoder_ffn_dim=40, decoder_ffn_dim=40, max_position_embeddings=32,
            pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS, decoder_start_token_id=EOS,
            forced_eos_token_id=None,
        )
    )  # fmt: skip
    theirs.load_state_dict(_as_bart(ours))
    return ours.double().eval(), theirs.double().eval()


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


def _as_bart(ours: Transformer) -> dict[str, torch.Tensor]:
    """The weights under BART's names; its table of positions begins with two that are never read."""
    own = ours.state_dict()
    table = own["tokens.weight"]
    tables = ("model.shared", "model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head")
    names = {f"{name}.weight": table for name in tables}
    names["final_logits_bias"] = torch.zeros(1, VOCAB)
    for side, norms in (
        ("encoder", ("self_attn_layer_norm", "final_layer_norm")),
        ("decoder", ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm")),
    ):
        there, here = f"model.{side}.", f"{side}.layers.0."
        positions = own[f"{side}.position.tables.0.weight"]
        names[f"{there}embed_positions.weight"] = torch.cat([positions[:2], positions])
        parts = {"layernorm_embedding": f"{side}_embedding.norm"}
        parts |= {f"layers.0.{norm}": f"{here}block.norms.{index}" for index, norm in enumerate(norms)}
        parts |= {"layers.0.fc1": f"{here}feedforward.up", "layers.0.fc2": f"{here}feedforward.down"}
        for our, their in ATTENTION.items():
            parts[f"layers.0.self_attn.{their}"] = f"{here}attention.{our}"
            if side == "decoder":
                parts[f"layers.0.encoder_attn.{their}"] = f"{here}cross_attention.{our}"
        for their, our in parts.items():
            for kind in ("weight", "bias"):
                names[f"{there}{their}.{kind}"] = own[f"{our}.{kind}"]
    return names
