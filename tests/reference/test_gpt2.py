"""The gpt2 preset, in tiny sizes, is transformers' GPT2LMHeadModel with the same weights."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.model import Transformer
from polyformer.presets import model_config

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 23, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3,
         "intermediate_size": 48, "max_position_embeddings": 19}  # fmt: skip


def turned(tensor: Tensor) -> Tensor:
    """A matrix of [in, out] as [out, in]; a bias as it is."""
    return tensor.T if tensor.dim() == 2 else tensor


def ours_from_theirs(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights, or their gradients, under our names; GPT-2 stores matrices transposed and q, k, v in one."""
    found = {"tokens.weight": theirs["transformer.wte.weight"],
             "decoder.position.tables.0.weight": theirs["transformer.wpe.weight"]}  # fmt: skip
    for kind in ("weight", "bias"):
        found[f"decoder.final_norm.{kind}"] = theirs[f"transformer.ln_f.{kind}"]
        for i in range(SIZES["num_hidden_layers"]):
            old, new = f"transformer.h.{i}", f"decoder.layers.{i}"
            found[f"{new}.block.norms.0.{kind}"] = theirs[f"{old}.ln_1.{kind}"]
            found[f"{new}.block.norms.1.{kind}"] = theirs[f"{old}.ln_2.{kind}"]
            joined = turned(theirs[f"{old}.attn.c_attn.{kind}"]).chunk(3)
            for name, tensor in zip(("query", "key", "value"), joined):
                found[f"{new}.attention.{name}.{kind}"] = tensor
            found[f"{new}.attention.output.{kind}"] = turned(theirs[f"{old}.attn.c_proj.{kind}"])
            found[f"{new}.feedforward.up.{kind}"] = turned(theirs[f"{old}.mlp.c_fc.{kind}"])
            found[f"{new}.feedforward.down.{kind}"] = turned(theirs[f"{old}.mlp.c_proj.{kind}"])
    return found


@pytest.fixture(scope="module")
def pair() -> tuple[Transformer, torch.nn.Module]:
    """Ours and theirs, in float64, with weights that are all away from zero and one."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=23, n_positions=19, n_embd=12, n_layer=2, n_head=3, attn_implementation="eager",
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    theirs = transformers.GPT2LMHeadModel(config).double().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    ours = Transformer(model_config("gpt2", dict(SIZES))).double().eval()
    ours.load_state_dict(ours_from_theirs(dict(theirs.state_dict())))
    return ours, theirs


def same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def batch(side: str) -> dict[str, Tensor]:
    torch.manual_seed(1)
    ids, mask = torch.randint(23, (3, 11)), torch.ones(3, 11, dtype=torch.long)
    if side == "right":
        mask[0, 8:], mask[1, 3:] = 0, 0
    if side == "left":
        mask[0, :3], mask[1, :8] = 0, 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@pytest.mark.parametrize("side", ["none", "right", "left"])
def test_outputs_and_gradients(pair: tuple[Transformer, torch.nn.Module], side: str):
    """Logits, loss, every hidden state, every attention, every gradient; padded batches at the real tokens.

    Theirs lets the padding before a text predict its first token, ours does not: that label is dropped.
    """
    ours, theirs = pair
    inputs = batch(side)
    real = inputs["attention_mask"].bool()
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp_min(0)
    first = inputs["labels"].clone()
    first[inputs["attention_mask"].diff(prepend=torch.ones(3, 1, dtype=torch.long), dim=1) > 0] = -100
    mine = ours(**inputs, output_hidden_states=True, output_attentions=True)
    inputs["labels"] = first
    other = theirs(**inputs, position_ids=positions, output_hidden_states=True, output_attentions=True)
    same(mine.logits[real], other.logits[real])
    torch.testing.assert_close(
        mine.loss.float(), other.loss, rtol=1e-6, atol=1e-6
    )  # theirs is float32 always
    exact = F.cross_entropy(other.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())
    same(mine.loss, exact)
    assert len(mine.hidden_states) == len(other.hidden_states) == 3
    for a, b in zip(mine.hidden_states, other.hidden_states):
        same(a[real], b[real])
    assert len(mine.attentions) == len(other.attentions) == 2
    for a, b in zip(mine.attentions, other.attentions):
        same(a.transpose(1, 2)[real], b.transpose(1, 2)[real])
    ours.zero_grad()
    theirs.zero_grad()
    mine.loss.backward()
    exact.backward()
    expected = ours_from_theirs(
        {name: one.grad for name, one in theirs.named_parameters() if one.grad is not None}
    )
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None
        same(parameter.grad, expected[name])


@torch.no_grad()
def test_decoding_with_a_cache(pair: tuple[Transformer, torch.nn.Module]):
    """Token by token through our state and through theirs."""
    ours, theirs = pair
    ids = batch("none")["input_ids"]
    state, past = None, None
    for token in ids.split(1, 1):
        mine = ours(token, state=state, use_cache=True)
        other = theirs(token, past_key_values=past, use_cache=True)
        state, past = mine.state, other.past_key_values
        same(mine.logits, other.logits)
