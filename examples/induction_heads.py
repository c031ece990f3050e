"""Find the induction heads of a decoder, and compare the loss without them and without other heads.

An induction head attends from a token to the token after its previous occurrence (Olsson et al. 2022). In a
random text that is repeated, its prefix-matching score is the mean weight on that token. Without such heads
the model cannot predict the second half.

python examples/induction_heads.py CHECKPOINT [HEADS]
"""

import sys

import torch
import torch.nn.functional as F

import polyformer

HALF, ROWS, DRAWS = 50, 4, 10


def repeated_tokens(vocabulary: int) -> torch.Tensor:
    """Return rows [ROWS, 2 HALF] of random tokens, repeated once."""
    half = torch.randint(100, vocabulary, (ROWS, HALF), generator=torch.Generator().manual_seed(0))
    return torch.cat([half, half], 1)


def matching_scores(model: torch.nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the prefix-matching scores [layers, H], and the mean outputs of all heads."""
    with polyformer.trace(model) as calls:
        weights = [layer.weights.keep() for layer in calls.layers]
        outputs = [layer.output.keep() for layer in calls.layers]
        model(ids)
    # The query at HALF + i repeats the token at i, and an induction head attends to i + 1.
    diagonals = [each[0].diagonal(1 - HALF, -2, -1)[..., 1:] for each in weights]
    scores = torch.stack([diagonal.mean((0, 2)) for diagonal in diagonals])
    return scores, [each[0].mean((0, 2)) for each in outputs]


def losses_without(
    model: torch.nn.Module, ids: torch.Tensor, heads: list[tuple[int, int]], means: list[torch.Tensor]
) -> tuple[float, float]:
    """Return the losses of the first and of the second half, with the mean output of `heads`."""
    with polyformer.trace(model) as calls:
        for layer, head in heads:
            calls.layer(layer).head(head).output.set(means[layer][head])
        logits = model(ids).logits
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    return losses[:, : HALF - 1].mean().item(), losses[:, HALF:].mean().item()


@torch.no_grad()
def main(name: str, number: int) -> None:
    """Print the scores of the best heads, and the losses without them and without as many other heads."""
    model = polyformer.from_pretrained(name).eval()
    ids = repeated_tokens(model.config.vocab_size)
    scores, means = matching_scores(model, ids)
    order = [divmod(index, scores.shape[1]) for index in scores.flatten().argsort(descending=True).tolist()]
    best, others = order[:number], order[number:]
    for layer, head in best:
        print(f"layer {layer:>2}, head {head:>2}: prefix-matching score {scores[layer, head]:.3f}")
    report = "loss of first half {:.3f}, second {:.3f}: {}".format
    print(report(*losses_without(model, ids, [], means), "all heads"))
    print(report(*losses_without(model, ids, best, means), "without them"))
    draw = torch.Generator().manual_seed(1)
    for _ in range(DRAWS):
        chosen = [others[index] for index in torch.randperm(len(others), generator=draw)[:number].tolist()]
        losses = losses_without(model, ids, chosen, means)
        print(report(*losses, "without others"))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 8)
