"""`generate(..., compile=True)`: the graph of a step gives the text of the step."""

import gc
import itertools
import os
import subprocess
import sys
import weakref

import pytest
import torch
from tiny_models import FAMILIES, VOCAB, decoder, left_padded, prompts

from polyformer import InputError, create_model
from polyformer.attention.mechanisms import softmax_attention
from polyformer.core import recorded_graph
from polyformer.core.errors import Caution
from polyformer.core.host_values import is_recorded
from polyformer.core.recorded_graph import RecordedGraph, ValueReadError, record
from polyformer.models.architectures import Transformer
from polyformer.models.architectures.weights import with_weights
from polyformer.models.generation import compiled_step
from polyformer.models.generation.compiled_step import LONG, _suggest_graph, captures_by_default

POSITIONS = (
    *("none", "learned", "learned_per_layer", "sinusoidal", "concatenated", "rope", "alibi", "t5"),
    *("shaw", "transformer_xl", "da", "deberta"),
)

SEARCHES = {
    "greedy": {},
    "sampling": {"do_sample": True, "seed": 3, "num_return_sequences": 2},
    "beams": {"num_beams": 3},
    "contrastive": {"penalty_alpha": 0.5},
    "look-up": {"draft": "lookup"},
    "processors": {"repetition_penalty": 1.3, "min_new_tokens": 9},
}


@pytest.fixture
def runs(monkeypatch) -> list[int]:
    """Graphs run operation by operation instead of compiled; the list grows with every run."""
    runs: list[int] = []

    def compiled(graph: RecordedGraph, inputs):
        def run(*tensors: torch.Tensor):
            runs.append(len(tensors))
            return graph.module(*tensors, *graph.constants)

        return run

    monkeypatch.setattr(RecordedGraph, "compiled", compiled)
    return runs


class RepeatedRun:
    """A function that reads and writes only its own copies of the inputs, as a CUDA graph does."""

    def __init__(self, function, inputs):
        self.function, self.inputs = function, [tensor.clone() for tensor in inputs]

    def run(self, *tensors: torch.Tensor):
        for own, x in zip(self.inputs, tensors, strict=True):
            if own is not x:
                own.copy_(x)
        return self.function(*self.inputs)


MEMORY = "any memory", "own memory"


def in_turn(*parameters):
    """Return the product of the parameters with either memory in turn, as on a chessboard."""
    numbered = itertools.product(*map(enumerate, parameters))
    return [(*(value for _, value in cell), MEMORY[sum(n for n, _ in cell) % 2]) for cell in numbered]


@pytest.fixture(params=MEMORY)
def memory(request, runs, monkeypatch) -> list[int]:
    """The same as `runs`, and the graphs read either any caches or only their own."""
    if request.param == "own memory":
        monkeypatch.setattr(compiled_step, "is_captured", lambda device: True)
        monkeypatch.setattr(compiled_step, "CudaGraph", RepeatedRun)
        run = RepeatedRun.run
        monkeypatch.setattr(RepeatedRun, "run", lambda *inputs: runs.append(0) or run(*inputs))
    return runs


@pytest.fixture
def records(monkeypatch) -> list[object]:
    """The steps that were recorded."""
    steps: list[object] = []
    monkeypatch.setattr(compiled_step, "record", lambda *inputs: steps.append(inputs) or record(*inputs))
    return steps


def assert_same_text(model: Transformer, *inputs: torch.Tensor | None, **settings) -> None:
    plain = model.generate(*inputs, max_new_tokens=20, **settings)
    compiled = model.generate(*inputs, max_new_tokens=20, compile=True, **settings)
    assert torch.equal(plain.sequences, compiled.sequences)
    close = 1e-9 if plain.scores.dtype == torch.float64 else 1e-5
    torch.testing.assert_close(plain.scores, compiled.scores, rtol=close, atol=close)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("search", SEARCHES)
def test_every_search_generates_the_same_text(family, search, memory):
    model = FAMILIES[family](4)
    for _ in range(2):
        assert_same_text(model, prompts(2, 5), **SEARCHES[search])
    assert memory or search == "look-up", "steps ran through the graph; drafts have other numbers of tokens"


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_that_end_leave_rows_of_the_graph_unused(family, memory, records):
    ids, mask = left_padded([prompts(1, length, length)[0] for length in (1, 4, 7, 3, 6)])
    model = FAMILIES[family](3)
    lengths = model.generate(ids, mask, max_new_tokens=20, min_new_tokens=4).lengths
    assert len(set(lengths.tolist())) > 1, "the texts end at different steps"
    assert_same_text(model, ids, mask, min_new_tokens=4)
    assert len(memory) == int(lengths.max()) - 3, "all steps but the first two read it"
    assert_same_text(model, ids, mask, min_new_tokens=8)
    assert len(records) == 1, "the second call uses the graph of the first"


MIXED = "PerLayer([Window(6), Causal(), Window(3) | Global(1)])"
ROLLING = {
    "window": ("greedy", {"attention": "Window(6)", "max_position_embeddings": 400}),
    "global": ("beams", {"attention": "Window(6) | Global(2)", "position": "rope"}),
    "alibi": ("look-up", {"attention": "Window(6)", "position": "alibi"}),
    "latent": ("beams", {"attention": {"latent": {}, "mechanism": "Window(6)"}, "position": "rope"}),
    "blocks": ("greedy", {"attention": "BlockWindow(4) | Global(1)", "position": "rope"}),
    "mixed": ("look-up", {"attention": MIXED, "position": "rope"}),
    "heads": ("beams", {"attention": "PerHead([Window(6), Window(3)])", "position": "transformer_xl"}),
}


@pytest.mark.parametrize(("name", "memory"), in_turn(ROLLING), indirect=["memory"])
def test_windows_read_a_buffer_of_fixed_size(name, memory):
    """The buffers are compacted several times."""
    search, options = ROLLING[name]
    torch.manual_seed(0)
    options = {"hidden_size": 16, "num_attention_heads": 2, "initializer_range": 0.5, **options}
    model = create_model("decoder-tiny", vocab_size=VOCAB, num_hidden_layers=3, **options).double().eval()
    ids, mask = left_padded([prompts(1, length, length)[0] for length in (30, 46)])
    settings = {"max_new_tokens": 300, "min_new_tokens": 300, **SEARCHES[search]}
    plain, compiled = (model.generate(ids, mask, compile=compile, **settings) for compile in (False, True))
    assert torch.equal(plain.sequences, compiled.sequences)
    assert len(memory) > 200 or search == "look-up"


CHANGES = {
    "a bias": (lambda model: model.decoder.layers[0].attention.query.bias.data.add_(3), False),
    "a weight": (lambda model: model.tokens.weight.data.neg_(), False),
    "another type": (lambda model: model.float(), True),
    "an attribute": (lambda model: setattr(model.decoder.final_norm, "eps", 0.5), True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_graph_is_used_again_until_the_model_changes(change, memory, records):
    model = decoder(4)
    for _ in range(3):
        assert_same_text(model, prompts(2, 5), min_new_tokens=5)
    assert len(records) == 1
    make, is_new = CHANGES[change]
    make(model)
    assert_same_text(model, prompts(2, 5), min_new_tokens=5)
    assert len(records) == 1 + is_new
    assert_same_text(model, prompts(3, 5), min_new_tokens=5)
    assert_same_text(model, prompts(2, 5), min_new_tokens=5)
    assert len(records) == 2 + is_new, "graphs for several numbers of rows are kept"


def test_the_graphs_of_a_model_end_with_it(memory):
    model = decoder(4)
    assert_same_text(model, prompts(2, 5))
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("search", ["greedy", "beams"])
def test_uninitialized_slots_have_no_effect(search, runs):
    plain = decoder(4).generate(prompts(2, 5), max_new_tokens=20, **SEARCHES[search])
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        compiled = decoder(4).generate(prompts(2, 5), max_new_tokens=20, compile=True, **SEARCHES[search])
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(plain.sequences, compiled.sequences)
    assert runs


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("padded", [False, True])
def test_every_position_scheme_counts_from_the_slot(position, padded, runs):
    torch.manual_seed(0)
    options = {"hidden_size": 16, "num_attention_heads": 2, "initializer_range": 0.5}
    model = create_model("decoder-tiny", vocab_size=VOCAB, position=position, **options).double().eval()
    ids, mask = left_padded([prompts(1, length, length)[0] for length in (3, 6)])
    assert_same_text(model, *((ids, mask) if padded else (prompts(2, 5), None)))
    assert len(runs) > 10


def test_the_compiled_graph_generates_the_same_text_for_changed_weights():
    model = decoder(4).float()
    assert_same_text(model, prompts(1, 5), min_new_tokens=20)
    assert_same_text(model, prompts(1, 5), min_new_tokens=20)
    known = len(recorded_graph._compiled)
    for parameter in model.parameters():
        parameter.data.mul_(-0.9)
    assert_same_text(model, prompts(1, 5), min_new_tokens=20)
    assert len(recorded_graph._compiled) == known, "weights are inputs of the compiled code"


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_with_quantized_weights_generates_the_same_text(family, rows, weights, runs):
    model = with_weights(FAMILIES[family](4).float(), weights)
    assert_same_text(model, prompts(rows, 5), min_new_tokens=20)
    assert runs
    changed = {
        name: value.flip(0) if "up.weight" in name else value for name, value in model.state_dict().items()
    }
    model.load_state_dict(changed)  # the same tensors with other values
    settings = {"max_new_tokens": 20, "min_new_tokens": 20}
    compiled = model.generate(prompts(rows, 5), compile=True, **settings)
    assert torch.equal(compiled.sequences, model.generate(prompts(rows, 5), **settings).sequences)


INT8 = {
    "groups": {"position": "rope", "attention.num_key_value_heads": 2},
    "learned": {"position": "learned"},
    "alibi": {"position": "alibi", "attention.num_key_value_heads": 1},
    "windows": {"position": "rope", "attention": "PerLayer([Window(6), Causal()])"},
}


def grouped_decoder(**options: object) -> Transformer:
    """A decoder with 4 query heads."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "attention.num_attention_heads": 4, "initializer_range": 0.5}
    return create_model("decoder-tiny", vocab_size=VOCAB, **sizes, **options).double().eval()


@pytest.mark.parametrize(("name", "search", "memory"), in_turn(INT8, SEARCHES), indirect=["memory"])
def test_a_step_reads_a_cache_of_integers(name, search, memory, monkeypatch):
    reads: list[bool] = []
    attend = softmax_attention.attend_to_integers
    monkeypatch.setattr(
        softmax_attention, "attend_to_integers", lambda *call: reads.append(is_recorded()) or attend(*call)
    )
    model = grouped_decoder(**INT8[name])
    ids, mask = left_padded([prompts(1, length, length)[0] for length in (4, 9, 6)])
    assert_same_text(model, ids, mask, cache="int8", **SEARCHES[search])
    assert any(reads) == (name != "alibi"), "ALiBi changes scores"
    assert memory or search == "look-up"


def test_compiled_code_reads_a_cache_of_integers():
    model = grouped_decoder(num_hidden_layers=1, **INT8["groups"]).float()
    ids, mask = left_padded([prompts(1, length, length)[0] for length in (4, 9)])
    assert_same_text(model, ids, mask, cache="int8", min_new_tokens=20)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "Strided(8)"}, "only softmax attention that is dense"),
        ({"attention": "performer"}, "only softmax attention that is dense"),
        ({"memory": "recurrent(length=8)", "position": "rope"}, "a memory or a depth policy"),
    ],
)
def test_a_model_without_a_step_of_fixed_size_is_refused(options, message):
    model = create_model("decoder-tiny", vocab_size=VOCAB, **options).eval()
    with pytest.raises(InputError, match=f"compile: .*{message}.*leave it out"):
        model.generate(prompts(1, 4), compile=True, max_new_tokens=9)


def test_hooks_and_contrasts_are_refused():
    model = decoder()
    with pytest.raises(InputError, match=r"compile: .*dola_layers"):
        model.generate(prompts(1, 4), compile=True, max_new_tokens=9, dola_layers="low")
    model.head.register_forward_hook(lambda *_: None)
    with pytest.raises(InputError, match=r"compile: .*hooks"):
        model.generate(prompts(1, 4), compile=True, max_new_tokens=9)


def test_without_a_compiler_the_error_names_it(tmp_path):
    code = """
import torch, polyformer
model = polyformer.create_model("decoder-tiny").eval()
model.generate(torch.ones(1, 4, dtype=torch.long), max_new_tokens=20, compile=True)
"""
    missing = {"CXX": str(tmp_path / "none"), "PATH": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | missing, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "InputError: compile: torch could not compile" in done.stderr
    assert "install a C++ compiler, or leave it out" in done.stderr


def test_a_graph_computes_for_other_inputs_and_reads_no_values():
    weight = torch.randn(3, 3)
    with pytest.raises(ValueReadError):
        record(lambda x: (x if x.sum() > 0 else -x,), [torch.ones(3)])
    graph = record(lambda x: (x @ weight, x.split(1)[1]), [torch.ones(2, 3)])
    assert [constant is weight for constant in graph.constants] == [True]
    x = torch.randn(2, 3)
    outputs = graph.module(x, weight)
    assert torch.equal(outputs[0], x @ weight)
    assert torch.equal(outputs[1], x[1:])


def test_the_next_process_reads_the_compiled_graph_from_the_cache(tmp_path):
    code = """
import torch, polyformer
from polyformer.core.ops import compiled_code
compile_anew = compiled_code._compiled
compiled_code._compiled = lambda *inputs: print("compiled") or compile_anew(*inputs)
torch.manual_seed(0)
model = polyformer.create_model("decoder-tiny", num_hidden_layers=1).eval()
print(model.generate(torch.ones(1, 4, dtype=torch.long), max_new_tokens=9, compile=True))
"""

    def process() -> str:
        environment = os.environ | {
            "XDG_CACHE_HOME": str(tmp_path),
            "XDG_STATE_HOME": str(tmp_path / "state"),
        }
        command = [sys.executable, "-c", code]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    first = process()
    assert first.startswith("compiled\n")
    assert process() == first.removeprefix("compiled\n")
    (file,) = (tmp_path / "polyformer" / "graphs").iterdir()
    file.write_bytes(file.read_bytes()[:1000])
    assert process() == first, "a damaged file counts as missing"


def test_a_graph_is_the_default_on_cuda_only():
    model, cuda = decoder(), torch.device("cuda")
    assert captures_by_default(model, cuda, 16)
    assert not captures_by_default(model, cuda, 15)
    assert not captures_by_default(model, torch.device("cpu"), 16)
    sparse = create_model("decoder-tiny", vocab_size=VOCAB, attention="Strided(8)").eval()
    assert not captures_by_default(sparse, cuda, 16)


def test_a_long_generation_on_a_cpu_is_told_of_graphs_once():
    _suggest_graph.cache_clear()
    with pytest.warns(Caution, match="compile=True"):
        captures_by_default(decoder(), torch.device("cpu"), LONG)
    captures_by_default(decoder(), torch.device("cpu"), LONG)  # another warning would be an error


def test_steps_run_one_by_one_if_a_graph_by_default_cannot_be_recorded(tmp_path):
    """No compiler is installed, and the choice for CUDA is made for this CPU."""
    code = """
import torch, polyformer
from polyformer.models.generation import decoder
model = polyformer.create_model("decoder-tiny").eval()
ids = torch.ones(1, 4, dtype=torch.long)
plain = model.generate(ids, max_new_tokens=20, compile=False).sequences
decoder.captures_by_default = lambda *_: True
assert torch.equal(model.generate(ids, max_new_tokens=20).sequences, plain)
"""
    missing = {"CXX": str(tmp_path / "none"), "PATH": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | missing, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the graph of a step could not be recorded") == 1
