"""Generation with masked diffusion models: which masks are filled when, blocks, caches, ends, refusals."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from polyformer import InputError, Transformer
from polyformer.models.generation import TextStreamer
from polyformer.models.generation.denoising import DenoisingRules, FinishedBlocks, WholeText, confidence
from polyformer.models.generation.results import Stopping
from polyformer.models.presets import model_config

VOCABULARY, MASK, END = 13, 12, 11
PROMPT = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])


def diffusion_model(size: int | None = None, seed: int = 0, **special: Any) -> Transformer:
    torch.manual_seed(seed)
    options = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_attention_heads": 4, "position": "rope"}
    options |= {"num_hidden_layers": 2, "dropout": 0.0, "head": "language_model"}
    if size is not None:
        options["attention"] = f"BlockDiffusion({size})"
    config = model_config("encoder-tiny", options)
    config = dataclasses.replace(config, special=dataclasses.replace(config.special, mask=MASK, **special))
    model = Transformer(config).double().eval()
    with torch.no_grad():  # far from uniform, so that no two confidences are nearly equal
        for weight in model.parameters():
            weight.mul_(6 if weight.dim() > 1 else 1)
    return model


def plainly(
    model: Transformer, prompt: Tensor, new: int, blocks: list[tuple[int, int]], steps: list[int], rule: str
) -> tuple[Tensor, Tensor]:
    """The algorithm of the paper for one text, mask by mask, every pass over the text up to `sees`."""
    text, score = torch.cat([prompt, torch.full((new,), MASK)]), 0.0
    size = getattr(model.config.encoder.attention.mechanism.pattern, "size", None)  # type: ignore[union-attr]
    for (start, stop), passes in zip(blocks, steps):
        for left in range(passes, 0, -1):
            seen = text[: len(text) if size is None else stop]
            log_p = model(seen[None]).logits[0].clone()
            log_p[:, MASK] = -torch.inf
            log_p = log_p.log_softmax(-1)
            masks = [i for i in range(start, stop) if text[i] == MASK]
            values = log_p.amax(-1) if rule == "confidence" else (log_p.exp() * log_p).nansum(-1)
            for i in sorted(masks, key=values.tolist().__getitem__, reverse=True)[: -(-len(masks) // left)]:
                text[i], score = log_p[i].argmax(), score + log_p[i].max().item()
    return text, torch.tensor(score)


@pytest.mark.parametrize("rule", ["confidence", "entropy"])
@pytest.mark.parametrize("length", [None, 3])
def test_generation_is_the_papers_algorithm(rule: str, length: int | None):
    model, new = diffusion_model(), 8
    blocks = [(5, 13)] if length is None else [(5, 8), (8, 11), (11, 13)]
    steps = [5] if length is None else [2, 2, 1]
    asked = {"denoising_steps": 5, "remasking": rule, "block_length": length}
    output = model.generate(PROMPT, max_new_tokens=new, eos_token_id=[], **asked)
    for row, text in enumerate(PROMPT):
        expected, score = plainly(model, text, new, blocks, steps, rule)
        assert torch.equal(output.sequences[row], expected)
        assert output.scores[row].item() == pytest.approx(score.item(), rel=1e-5)
    assert output.lengths.tolist() == [new, new]


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("new", [1, 9])
def test_a_cache_of_finished_blocks_changes_nothing(size: int, new: int):
    """As if every pass read the whole text up to the end of the block; blocks begin within the prompt."""
    model = diffusion_model(size)
    edges = sorted({5, 5 + new, *(edge for edge in range(0, 5 + new, size) if edge > 5)})
    blocks = [*itertools.pairwise(edges)]
    output = model.generate(PROMPT, max_new_tokens=new, eos_token_id=[])
    for row, text in enumerate(PROMPT):
        steps = [stop - start for start, stop in blocks]
        expected, score = plainly(model, text, new, blocks, steps, "confidence")
        assert torch.equal(output.sequences[row], expected)
        assert output.scores[row].item() == pytest.approx(score.item(), rel=1e-5)


def test_a_pass_with_a_cache_reads_one_block():
    model, read = diffusion_model(4), []
    model.tokens.register_forward_pre_hook(lambda _, arguments: read.append(arguments[0].shape[1]))
    model.generate(PROMPT, max_new_tokens=11, denoising_steps=4, eos_token_id=[])
    # The finished block of the prompt, 4 passes over the current block, and 2 over blocks that are finished.
    assert read == [4] * 7


@pytest.mark.parametrize("size", [None, 4])
@pytest.mark.parametrize("padding", [1, 3])
def test_padded_prompts_are_written_as_alone(size: int | None, padding: int):
    model = diffusion_model(size)
    ids = torch.cat([torch.zeros(1, padding, dtype=torch.long), PROMPT[:1, : 5 - padding]], 1)
    ids = torch.cat([ids, PROMPT[1:]])
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    asked = {"max_new_tokens": 6, "denoising_steps": 4, "eos_token_id": []}
    both = model.generate(ids, mask, **asked)
    for row, first in enumerate((padding, 0)):
        alone = model.generate(ids[row : row + 1, first:], **asked)
        assert both.new_tokens()[row] == alone.new_tokens()[0]
        assert both.scores[row].item() == pytest.approx(alone.scores.item(), rel=1e-5)


@pytest.mark.parametrize("size", [None, 3])
def test_a_text_ends_with_its_first_end_token(size: int | None):
    model = diffusion_model(size)
    free = model.generate(PROMPT, max_new_tokens=9, eos_token_id=[], block_length=None if size else 3)
    end = free.new_tokens()[0][4]
    output = model.generate(PROMPT, max_new_tokens=9, eos_token_id=end, block_length=None if size else 3)
    for tokens, whole, length in zip(output.new_tokens(), free.new_tokens(), output.lengths.tolist()):
        expected = whole.index(end) + 1 if end in whole else 9
        assert length == expected
        assert tokens == whole[:expected]


def test_tokens_are_streamed_block_by_block_up_to_the_end():
    model = diffusion_model(3)
    free = model.generate(PROMPT[:1], max_new_tokens=9, eos_token_id=[]).new_tokens()[0]
    end, pieces = free[4], []
    letters = "abcdefghijklm"
    streamer = TextStreamer(lambda ids: "".join(letters[i] for i in ids), write=pieces.append)
    output = model.generate(PROMPT[:1], streamer=streamer, max_new_tokens=9, eos_token_id=end)
    streamer.finish()
    assert "".join(pieces) == "".join(letters[i] for i in output.new_tokens()[0])
    assert output.new_tokens()[0] == free[: free.index(end) + 1]


def test_a_stop_string_ends_the_text_after_its_block():
    model, letters = diffusion_model(3), "abcdefghijklm"
    free = model.generate(PROMPT[:1], max_new_tokens=12, eos_token_id=[]).new_tokens()[0]
    stop = letters[free[5]]
    decode = lambda ids: "".join(letters[i] for i in ids)  # noqa: E731
    output = model.generate(PROMPT[:1], decode=decode, max_new_tokens=12, eos_token_id=[], stop=[stop])
    text = "".join(letters[i] for i in free)
    assert output.texts(decode, (stop,)) == [text[: text.index(stop)]]
    assert output.lengths.item() < 12


def test_samples_in_random_order_follow_the_any_order_distribution():
    """Two new tokens, one a pass: p(a, b) is the mean over both orders; frequencies are within 4 errors."""
    model, count = diffusion_model(seed=3), 4000
    with torch.no_grad():
        for weight in model.parameters():
            weight.div_(3 if weight.dim() > 1 else 1)
    prompt, expected = PROMPT[:1], torch.zeros(VOCABULARY, VOCABULARY, dtype=torch.double)

    def shares(tokens: list[int], place: int) -> Tensor:
        logits = model(torch.cat([prompt, torch.tensor([tokens])], 1)).logits[0, 5 + place].detach()
        return logits.index_fill(0, torch.tensor(MASK), -torch.inf).softmax(-1)

    for token in range(MASK):
        left, right = shares([MASK, MASK], 0)[token], shares([MASK, MASK], 1)[token]
        expected[token] += left * shares([token, MASK], 1) / 2
        expected[:, token] += right * shares([MASK, token], 0) / 2
    asked: dict[str, Any] = {"do_sample": True, "remasking": "random", "num_return_sequences": count}
    output = model.generate(prompt, max_new_tokens=2, eos_token_id=[], seed=0, **asked)
    pairs = torch.tensor(output.new_tokens())
    frequency = torch.zeros_like(expected).index_put((pairs[:, 0], pairs[:, 1]), expected.new_ones(()), True)
    error = (expected * (1 - expected) / count).sqrt()
    assert ((frequency / count - expected).abs() <= 4 * error + 1e-3).all()
    assert expected.sum().item() == pytest.approx(1)


def test_passes_are_shared_in_proportion_to_the_tokens():
    def shares(new: int, steps: int, blocks: list[tuple[int, int]]) -> list[int]:
        rules = DenoisingRules(new, steps, 0, 0, (), lambda x: x, confidence("confidence", None), Stopping())
        return [share for _, share in rules.shares(blocks)]

    assert shares(12, 6, [(0, 4), (4, 8), (8, 12)]) == [2, 2, 2]
    assert shares(9, 3, [(0, 1), (1, 5), (5, 9)]) == [1, 1, 1]
    assert shares(9, 9, [(3, 4), (4, 8), (8, 12)]) == [1, 4, 4]
    assert sum(shares(40, 17, [(0, 1), (1, 21), (21, 40)])) == 17


def test_the_readers_blocks_cover_the_new_tokens():
    model = diffusion_model(4)
    assert FinishedBlocks(model, 4, 13).blocks(5, 13) == [(5, 8), (8, 12), (12, 13)]
    assert WholeText(model, 3, None).blocks(5, 13) == [(5, 8), (8, 11), (11, 13)]
    assert WholeText(model, None, None).blocks(5, 13) == [(5, 13)]


REFUSED = {
    "num_beams": ({"num_beams": 2}, "beam: a masked diffusion model writes its tokens in any order"),
    "draft": ({"draft": "lookup"}, "draft: a masked diffusion model"),
    "steps": ({"denoising_steps": 9}, "denoising_steps: expected 1 to 8, one or more for each block"),
    "blocks": ({"denoising_steps": 1, "block_length": 4}, "denoising_steps: expected 2 to 8"),
    "random": ({"remasking": "random"}, "remasking: 'random' draws numbers; set do_sample"),
    "least": ({"min_new_tokens": 3}, "min_new_tokens: a masked diffusion model"),
    "types": ({"token_type_ids": PROMPT}, "token_type_ids: a masked diffusion model"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_do_not_fit_are_refused(name: str):
    settings, message = REFUSED[name]
    with pytest.raises(InputError, match=message):
        diffusion_model().generate(PROMPT, max_new_tokens=8, **settings)


def test_models_that_do_not_fit_are_refused():
    with pytest.raises(InputError, match="block_length: the model's attention has blocks of 4 tokens, got 3"):
        diffusion_model(4).generate(PROMPT, block_length=3)
    decoder = Transformer(model_config("decoder-tiny"))
    with pytest.raises(InputError, match="denoising_steps: only masked diffusion models"):
        decoder.eval().generate(PROMPT, denoising_steps=3)
    plain = Transformer(model_config("encoder-tiny", {"head": "language_model"})).eval()
    with pytest.raises(InputError, match="generate: needs a decoder"):
        plain.generate(PROMPT)
