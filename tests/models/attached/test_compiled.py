"""Compiled graphs: `generate` with a static cache, and what was attached, give what they give without one."""

import itertools
from typing import Any

import pytest
import torch
import torch._dynamo.utils
import transformers
from attached_models import BY_NAME, OURS, build, inputs, padding, token_ids
from torch import Tensor

import polyformer
from registered import EVERYTHING

FAMILIES = "Llama", "GPT2", "T5", "Whisper"


@pytest.fixture(autouse=True)
def fresh() -> None:
    """No graph of an earlier test."""
    torch.compiler.reset()


def batches(name: str) -> list[dict[str, Tensor]]:
    """Two batches of one shape; texts before which there is padding."""
    batch = inputs(BY_NAME[name])
    batch.pop("decoder_input_ids", None)
    if BY_NAME[name].kind == "decoder":
        batch["attention_mask"] = padding(right=0)
    return [batch, {key: tensor if "mask" in key else tensor.flip(1) for key, tensor in batch.items()}]


def generated(model: Any, batch: dict[str, Tensor], **options: Any) -> Any:
    """What greedy search writes, with the scores."""
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0, **options}
    return model.generate(**batch, **options, return_dict_in_generate=True, output_scores=True)


def assert_writes_the_same(model: Any, name: str, fullgraph: bool = True) -> None:
    """Two batches, written by graphs of one step: the tokens and scores of no graph and a growing cache."""
    expected = [generated(model, batch) for batch in batches(name)]
    assert not hasattr(model, "_compiled_call")
    how = transformers.CompileConfig(fullgraph=fullgraph, dynamic=False, backend="aot_eager")
    how._compile_all_devices = True  # type: ignore[attr-defined]
    torch._dynamo.utils.counters.clear()
    for batch, other in zip(batches(name), expected, strict=True):
        answer = generated(model, batch, cache_implementation="static", compile_config=how)
        assert hasattr(model, "_compiled_call"), "transformers has compiled it"
        assert torch.equal(answer.sequences, other.sequences)
        for mine, score in zip(answer.scores, other.scores, strict=True):
            torch.testing.assert_close(mine, score, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_static_cache_needs_one_graph(name: str):
    """Without a break, made once for all steps of both texts, as with torch's own attention."""
    model = build(BY_NAME[name])
    model.set_attn_implementation(OURS)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_writes_the_same(model, name)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


def even(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """A `mask_mod`: every second key, and the query's own."""
    return (kv_idx % 2 == 0) | (q_idx == kv_idx)


def nearer(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """A `score_mod`."""
    return score - 0.3 * (q_idx - kv_idx) * (h + 1)


ATTACHED: dict[str, dict[str, Any]] = {
    "window": {"attention": "Window(3) | Global(2)"},
    "heads": {"attention": "PerHead([Window(2), Full(), BlockWindow(4), Strided(3)])"},
    "mask_mod": {"attention": even},
    "alibi": {"attention": "Window(5)", "position": "alibi"},
    "t5": {"position": "t5(num_buckets=8, max_distance=16)"},
    "score_mod": {"attention": "Window(5)", "score_mod": nearer},
}


def with_attached(name: str, what: str) -> Any:
    """A model of one layer with one of `ATTACHED`, learned biases not 0."""
    model = polyformer.attach(build(BY_NAME[name], num_hidden_layers=1), **ATTACHED[what])
    for key, parameter in model.named_parameters():
        if "polyformer" in key:
            torch.nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize("what", ATTACHED)
def test_what_is_attached_goes_into_the_graph(what: str):
    """The first query's slot is a tensor there; positions count real tokens."""
    assert_writes_the_same(with_attached("Llama", what), "Llama")


@pytest.mark.parametrize(
    ("what", "name"), [("window", "Llama"), ("heads", "Bert"), ("window", "Bert"), ("t5", "Bert")]
)
def test_masks_made_inside_a_graph_say_where_tokens_are(name: str, what: str):
    """Padding before a text has no global tokens, and T5's buckets know of no future in a decoder."""
    model = with_attached(name, what)
    batch = {"input_ids": token_ids(), "attention_mask": padding()}
    expected = model(**batch)[0]
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    seen = batch["attention_mask"].bool()
    torch.testing.assert_close(compiled(**batch)[0][seen], expected[seen], rtol=0, atol=1e-5)


def test_packed_texts_have_global_tokens_of_their_own_in_a_graph():
    """Positions that begin anew say where a text begins."""
    model = with_attached("Llama", "window")
    positions = torch.cat([torch.arange(length) for length in (5, 1, 6)]).expand(2, -1)
    options = {"input_ids": token_ids(), "position_ids": positions, "use_cache": False}
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(**options)[0], model(**options)[0], rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_cache_filled_by_a_graph():
    """A mask of padding alone, and the number of the first query counted in the cache."""
    model, mask = with_attached("Llama", "window"), padding(right=0)
    outputs, stops = [], (9, 10, 12) if EVERYTHING else (9, 12)
    for run in (model, torch.compile(model, fullgraph=True, backend="eager")):
        cache = transformers.StaticCache(config=model.config, max_cache_len=16)
        parts = itertools.starmap(slice, itertools.pairwise((0, *stops)))
        calls = [
            run(token_ids()[:, part], attention_mask=mask[:, : part.stop], past_key_values=cache)[0]
            for part in parts
        ]
        outputs.append(torch.cat(calls, 1)[mask.bool()])
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=1e-5)
