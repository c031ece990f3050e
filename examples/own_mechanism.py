"""Your own attention mechanism in fifteen lines: sigmoid attention, complete.

    python examples/own_mechanism.py
    polyformer audit sigmoid-model --import examples/own_mechanism.py

You write how scores become weights. The base class does the rest: causality, padding, packed documents, the
KV cache, patterns, position biases and cross-attention. Ramapuram et al. 2024, section 3.
"""

import dataclasses

import torch

import polyformer
from polyformer.attention.mechanisms import PairWeights, PairWeightsConfig


class Sigmoid(PairWeights):
    """y_i = sum_j sigmoid(q_i . k_j / sqrt(D) - log n_i) v_j, where the query i sees n_i keys."""

    def weights(self, scores, allowed):
        """Return the weights [B, H, Tq, Tk]; each key has its own, and they need not sum to 1."""
        n = allowed.sum(-1, keepdim=True).clamp_min(1)  # not the length of the row: it may have padding
        return torch.sigmoid(scores - n.log())


@dataclasses.dataclass(frozen=True, kw_only=True)
class SigmoidConfig(PairWeightsConfig):
    """Sigmoid attention. Its options are those of `PairWeightsConfig`: `pattern`, `dropout`, `scale`."""

    kind = "my_sigmoid"
    paper = "Ramapuram et al. 2024, section 3"

    def build(self, num_heads, head_size):
        """Return the module of a layer."""
        return Sigmoid(self)


if __name__ == "__main__":
    torch.manual_seed(0)
    window = "my_sigmoid(pattern=Window(16, 0))"
    model = polyformer.create_model("decoder-tiny", vocab_size=64, attention=window, position="t5").eval()
    ids = torch.randint(3, 64, (2, 24))

    # Two documents in one row are as in two rows, here with a window of keys and a bias of positions.
    documents = torch.tensor([[0] * 10 + [1] * 14]).expand_as(ids)
    packed = model(ids, document_ids=documents).logits[:, 10:]
    print(f"packing changes nothing: {torch.allclose(packed, model(ids[:, 10:]).logits, atol=1e-5)}")

    # Padding on the left is not seen either.
    mask = torch.ones_like(ids).index_fill(1, torch.arange(5), 0)
    padded = model(ids, attention_mask=mask).logits[:, 5:]
    print(f"padding changes nothing: {torch.allclose(padded, model(ids[:, 5:]).logits, atol=1e-5)}")

    # Generation keeps the keys of earlier tokens in a cache; the same without it:
    text = ids
    for _ in range(8):
        text = torch.cat([text, model(text).logits[:, -1:].argmax(-1)], 1)
    generated = model.generate(ids, max_new_tokens=8, eos=[]).sequences
    print(f"the cache changes nothing: {torch.equal(generated, text)}")
    model.save_pretrained("sigmoid-model")
