"""Models in GGUF files: equal to the models that were written, and to what transformers reads."""

import copy
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
transformers = pytest.importorskip("transformers")
pytest.importorskip("gguf")

import numpy as np  # noqa: E402

import polyformer  # noqa: E402
from gguf_files import Kind, described, tensors_of, write  # noqa: E402
from polyformer.cli.main import main  # noqa: E402
from polyformer.core.errors import InputError  # noqa: E402
from polyformer.models.architectures.int4 import Int4Linear  # noqa: E402
from polyformer.models.architectures.weights import with_weights  # noqa: E402
from polyformer.models.checkpoints import config_of  # noqa: E402
from polyformer.models.checkpoints.gguf import BYTES_AT_ONCE, open_gguf  # noqa: E402
from tolerances import assert_rounded  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IDS = torch.arange(22).view(2, 11) + 5
TOKENS = {"bos_token_id": 1, "eos_token_id": 2}


def their_model(family: str, **options: Any) -> Any:
    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **options})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def written(path: Path, model: Any, kind: Kind = Kind.F32, **values: Any) -> Path:
    """The model as llama.cpp's converter writes it."""
    name = {"mistral": "llama"}.get(model.config.model_type, model.config.model_type)
    tensors = tensors_of(model, kind, permuted=name == "llama")
    if model.config.rope_parameters["rope_type"] == "llama3":
        tensors["rope_freqs.weight"] = (llama3_factors(model.config), Kind.F32)
    return write(path, name, described(model.config) | values, tensors, TOKENS)


def llama3_factors(config: Any) -> np.ndarray:
    """What frequencies are divided by, as llama.cpp's converter computes it (`generate_extra_tensors`)."""
    rope = config.rope_parameters
    low, high, length = (
        rope[name] for name in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    factors = []
    for channel in range(0, config.head_dim, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (channel / config.head_dim)
        if wavelength < length / high:
            factors.append(1.0)
        elif wavelength > length / low:
            factors.append(rope["factor"])
        else:
            smooth = (length / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


@torch.no_grad()
def same_logits(ours: Any, theirs: Any) -> None:
    assert_rounded(ours(IDS).logits, theirs(IDS).logits, copy.deepcopy(theirs).double()(IDS).logits)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 500.0}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("Llama", {}, {"rope.dimension_count": 64, "expert_count": 0}),
    "tied": ("Llama", {"tie_word_embeddings": True}, {}),
    "biases": ("Llama", {"attention_bias": True, "mlp_bias": True}, {}),
    "wide heads": ("Llama", {"head_dim": 32}, {"attention.key_length": 32, "attention.value_length": 32}),
    "llama 3": ("Llama", {"rope_parameters": LLAMA3}, {}),
    "linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
    ),
    "yarn": (
        "Qwen2",
        {"rope_parameters": YARN, "tie_word_embeddings": True},
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 16,
        },
    ),
    "qwen2": ("Qwen2", {"rope_parameters": {"rope_theta": 500.0}}, {}),
    "window": ("Mistral", {"sliding_window": 4}, {"attention.sliding_window": 4}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_file_is_the_model_that_was_written(case: str, tmp_path: Path):
    family, options, values = CASES[case]
    theirs = their_model(family, **options)
    ours = polyformer.from_pretrained(written(tmp_path / "model.gguf", theirs, **values))
    same_logits(ours, theirs)
    ours.save_pretrained(tmp_path / "hub", format="hub")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hub")
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


KINDS = ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q4_K", "Q6_K"]


@pytest.mark.parametrize(("family", "kind"), [*(("Llama", kind) for kind in KINDS), ("Qwen2", "Q4_K")])
def test_quantized_files_are_what_transformers_reads(family: str, kind: str, tmp_path: Path):
    path = written(tmp_path / "model.gguf", their_model(family), Kind[kind])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32
    )
    for source in (path, tmp_path):  # a folder with one such file is it
        same_logits(polyformer.from_pretrained(source), theirs)


def test_other_types_and_heads(tmp_path: Path):
    path = written(tmp_path / "model.gguf", their_model("Llama"), Kind.Q8_0)
    whole = polyformer.from_pretrained(path)
    half = polyformer.from_pretrained(path, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    for name, tensor in whole.state_dict().items():
        assert torch.equal(half.state_dict()[name], tensor.bfloat16()), name
    assert polyformer.from_pretrained(path, weights="int8").config.weights == "int8"
    assert polyformer.from_pretrained(path, head="embed").config.head.kind == "embed"
    assert config_of(path) == whole.config


@torch.no_grad()
@pytest.mark.parametrize(("family", "kind"), [("Llama", "Q4_0"), ("Llama", "Q4_1"), ("Qwen2", "Q4_1")])
def test_stored_numbers_are_kept(family: str, kind: str, tmp_path: Path):
    path = written(tmp_path / "model.gguf", their_model(family), Kind[kind])
    whole, stored = polyformer.from_pretrained(path), polyformer.from_pretrained(path, weights="stored")
    assert stored.config.weights == "stored"
    layers = [module for module in stored.modules() if isinstance(module, Int4Linear)]
    assert len(layers) == 7 * SIZES["num_hidden_layers"]
    back = with_weights(stored, "float32").state_dict()
    for name, tensor in whole.state_dict().items():
        assert torch.equal(back[name], tensor), name
    ids = torch.arange(80).view(2, 40) % 33 + 5  # more rows than torch's kernel computes
    assert_rounded(stored(ids).logits, whole(ids).logits, copy.deepcopy(whole).double()(ids).logits)
    step, exact = stored(ids[:, :4]).logits, whole(ids[:, :4]).logits
    assert float((step - exact).abs().max()) < 0.03 * float(exact.abs().max())
    stored.save_pretrained(tmp_path / "own")
    again = polyformer.from_pretrained(tmp_path / "own")
    assert again.config == stored.config
    assert torch.equal(again(ids).logits, stored(ids).logits)
    assert main(["convert", str(path), str(tmp_path / "converted"), "--weights", "stored"]) in (0, None)
    assert polyformer.from_pretrained(tmp_path / "converted").config == stored.config
    plain = again.generate(ids[:, :4], max_new_tokens=6, min_new_tokens=6)
    compiled = stored.generate(ids[:, :4], max_new_tokens=6, min_new_tokens=6, compile=True)
    assert torch.equal(compiled.sequences, plain.sequences)


def test_stored_numbers_of_other_types_are_refused(tmp_path: Path):
    path = written(tmp_path / "model.gguf", their_model("Llama"), Kind.Q8_0)
    with pytest.raises(InputError, match=r"blk\.0\.attn_q\.weight.* of type Q8_0"):
        polyformer.from_pretrained(path, weights="stored")


def test_several_ends_of_a_text(tmp_path: Path):
    theirs = their_model("Llama")
    tokens = TOKENS | {"eot_token_id": 7}
    path = write(tmp_path / "a.gguf", "llama", described(theirs.config), tensors_of(theirs), tokens)
    assert polyformer.from_pretrained(path).generation == {"eos_token_id": [2, 7]}


def test_memory_is_that_of_one_tensor(tmp_path: Path):
    """Beside a tensor itself, which is torch's memory, a few of the pieces in which it is dequantized."""
    theirs = their_model("Llama", vocab_size=32768)  # a table of 32 MiB
    path = written(tmp_path / "model.gguf", theirs, Kind.Q8_0)
    _, tensors = open_gguf(path)
    tracemalloc.start()
    table = tensors["model.embed_tokens.weight"]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert table.nbytes == 2**25
    assert peak < 4 * BYTES_AT_ONCE
