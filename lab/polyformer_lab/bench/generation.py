"""Generation compared with other libraries with the same weights: one text, a batch, and beam search.

Weights and prompts are random and there is no end token, so that every text has all its tokens: tokens of a
decoder follow a prompt, tokens of an encoder-decoder a source of the same length.

The function of a library takes a `Pair` and returns a function (ids [B, P], tokens, beams) -> tokens [B, N];
it raises `AbsentError` or `ImportError` if it cannot take part.
"""

import copy
import dataclasses
import functools
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.core.ops.compiled_code import prepare_inductor
from polyformer.models.attached import attach
from polyformer.models.checkpoints import FAMILIES, convert
from polyformer.models.generation import BeamConfig, GenerationConfig, SpecialIds
from polyformer.models.presets import model_config
from polyformer_lab.bench.passes import Pair
from polyformer_lab.bench.rows import OURS, AbsentError, Case, DeviceBench, Make, Row, check_names
from polyformer_lab.bench.running import runner

COMPILED, WINDOWED = f"{OURS}-compiled", f"{OURS}-window"
REDUCED = "bfloat16", "int8", "int4"
QUANTIZED = "int8", "int4"

WINDOW = "Window(512) | Global(4)"
"""The attention of the contenders with windows."""

Write = Callable[[Tensor, int, int], Tensor]

LAYER = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
WHOLE = {"wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm"}
"""Names of the parts in transformers' GPT-2, and in a GGUF file."""


def ours(pair: Pair, compile: bool = False) -> Write:
    """Return generation by polyformer; compile: with a compiled step."""

    def write(ids: Tensor, count: int, beams: int) -> Tensor:
        beam = BeamConfig()
        if beams > 1:
            beam = BeamConfig(
                num_beams=beams, normalization="length", length_penalty=1.0, early_stopping=False
            )
        asked = GenerationConfig(max_new_tokens=count, special=SpecialIds(eos=()), beam=beam)
        return pair.ours.generate(ids, config=asked, compile=compile).sequences[:, -count:]

    return write


def ours_with(weights: str, pair: Pair, compile: bool = False) -> Write:
    """Return generation by polyformer with weights of a kind; compile: with a compiled step."""
    if weights == "bfloat16" and not (torch.cuda.is_available() or torch.cpu._is_avx512_bf16_supported()):
        raise AbsentError("this processor has no bfloat16")
    from polyformer.models.architectures.weights import with_weights  # pyright: ignore[reportMissingImports]

    return ours(dataclasses.replace(pair, ours=with_weights(copy.deepcopy(pair.ours), weights)), compile)


def ours_windowed(pair: Pair) -> Write:
    """Return generation by polyformer, converted to windows."""
    return ours(dataclasses.replace(pair, ours=convert(pair.ours, WINDOW)[0]))


def transformers_windowed(pair: Pair) -> Write:
    """Return transformers with windows attached to its layers."""
    return transformers(
        dataclasses.replace(pair, theirs=attach(copy.deepcopy(pair.transformers_model()), WINDOW))
    )


def transformers_compiled(pair: Pair) -> Write:
    """Return transformers with a static cache and compiled steps, which are its default only on a GPU."""
    from transformers import CompileConfig

    prepare_inductor()
    mode = "reduce-overhead" if torch.cuda.is_available() else "default"  # as transformers on a GPU
    compiled: Any = CompileConfig(fullgraph=False, dynamic=False, mode=mode)
    compiled._compile_all_devices = True
    return transformers(pair, cache_implementation="static", compile_config=compiled)


def transformers(pair: Pair, **how: Any) -> Write:
    """Return transformers, by default without changes."""
    model = pair.transformers_model()
    settings = model.generation_config
    settings.eos_token_id = settings.forced_eos_token_id = None

    def write(ids: Tensor, count: int, beams: int) -> Tensor:
        asked = {"do_sample": False, "max_new_tokens": count, "num_beams": beams, "pad_token_id": 0}
        return model.generate(ids, attention_mask=torch.ones_like(ids), **asked, **how)[:, -count:]

    return write


def ctranslate2(weights: str, pair: Pair) -> Write:
    """Return CTranslate2 with weights of one type, in int8 their inputs too.

    The text of a token is its number, since CTranslate2 takes texts; its converter reads a saved model.
    """
    model = pair.transformers_model()
    if torch.device(model.device).type != "cpu":
        raise AbsentError("it is measured on a CPU alone")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ctranslate2 as library
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {str(number): number for number in range(model.config.vocab_size)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="1")),
        **{"unk_token": "1", "eos_token": "2", "pad_token": "0", "bos_token": "0"},
    )
    with tempfile.TemporaryDirectory(prefix="polyformer-bench-") as folder:
        saved, converted = Path(folder, "saved"), Path(folder, "converted")
        model.save_pretrained(saved)
        tokenizer.save_pretrained(saved)
        library.converters.TransformersConverter(str(saved)).convert(str(converted), quantization=weights)
        two_stacks = model.config.is_encoder_decoder
        kind = library.Translator if two_stacks else library.Generator
        loaded = kind(str(converted), "cpu", compute_type=weights, intra_threads=torch.get_num_threads())

    def write(ids: Tensor, count: int, beams: int) -> Tensor:
        texts = [[str(number) for number in row] for row in ids.tolist()]
        if two_stacks:
            limits = {"max_decoding_length": count, "min_decoding_length": count}
            results = loaded.translate_batch(texts, beam_size=beams, **limits)
            rows = [[int(word) for word in result.hypotheses[0]] for result in results]
        else:
            limits = {"max_length": count, "min_length": count, "include_prompt_in_result": False}
            results = loaded.generate_batch(texts, beam_size=beams, **limits)
            rows = [result.sequences_ids[0] for result in results]
        return torch.tensor(rows)

    return write


def llama_cpp(weights: str, pair: Pair) -> Write:
    """Return llama.cpp with GPT-2, one text per call; `weights`: a type of GGUF, such as "F32" or "Q8_0"."""
    model = pair.transformers_model()
    if model.config.model_type != "gpt2" or torch.device(model.device).type != "cpu":
        raise AbsentError("it is measured with GPT-2 on a CPU alone")
    from llama_cpp import Llama  # pyright: ignore[reportMissingImports]

    with tempfile.TemporaryDirectory(prefix="polyformer-bench-") as folder:
        file = Path(folder, "model.gguf")
        write_gguf(model, weights, file)
        loaded = Llama(
            str(file), n_ctx=model.config.n_positions, n_threads=torch.get_num_threads(), verbose=False
        )

    def write(ids: Tensor, count: int, beams: int) -> Tensor:
        if len(ids) > 1 or beams > 1:
            raise AbsentError("it is measured with one text and no beams alone")
        loaded.reset()  # otherwise it keeps the cache of the last prompt
        tokens = loaded.generate(ids[0].tolist(), temp=0.0, repeat_penalty=1.0)
        return torch.tensor([[next(tokens) for _ in range(count)]])

    return write


def write_gguf(model: Any, weights: str, file: Path) -> None:
    """Write transformers' GPT-2 as a GGUF file without a tokenizer; matrices are [outputs, inputs] there."""
    import gguf  # pyright: ignore[reportMissingImports]

    config, kind = model.config, gguf.GGMLQuantizationType[weights]
    writer = gguf.GGUFWriter(str(file), "gpt2")
    sizes = {"block_count": config.n_layer, "context_length": config.n_positions, "head_count": config.n_head}
    sizes |= {"embedding_length": config.n_embd, "feed_forward_length": 4 * config.n_embd}
    sizes |= {"layer_norm_eps": config.layer_norm_epsilon, "vocab_size": config.vocab_size}
    for name, value in (sizes | {"tokenizer_model": "no_vocab"}).items():
        getattr(writer, f"add_{name}")(value)
    for name, tensor in model.transformer.state_dict().items():
        part, _, end = name.rpartition(".")
        if part.startswith("h."):
            _, layer, part = part.split(".", 2)
            name = f"blk.{layer}.{LAYER[part]}.{end}"
        else:
            name = f"{WHOLE[part]}.{end}"
        transposed = end == "weight" and part in LAYER and not part.startswith("ln")
        data = (tensor.T if transposed else tensor).contiguous().numpy()
        if data.ndim == 2 and part != "wpe":
            writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


LIBRARIES: dict[str, Callable[[Pair], Write]] = {
    "transformers": transformers,
    "transformers-compiled": transformers_compiled,
    "transformers-window": transformers_windowed,
    "ctranslate2": functools.partial(ctranslate2, "float32"),
    "ctranslate2-int8": functools.partial(ctranslate2, "int8"),
    "llama.cpp": functools.partial(llama_cpp, "F32"),
    "llama.cpp-int8": functools.partial(llama_cpp, "Q8_0"),  # 32 weights to a scale
    "llama.cpp-int4": functools.partial(llama_cpp, "Q4_1"),
    OURS: ours,
    WINDOWED: ours_windowed,
    COMPILED: functools.partial(ours, compile=True),
    **{f"{OURS}-{weights}": functools.partial(ours_with, weights) for weights in REDUCED},
    **{f"{COMPILED}-{weights}": functools.partial(ours_with, weights, compile=True) for weights in REDUCED},
}
"""Libraries by name; the part after the hyphen names the weights if they are not float32, or the mode."""


def quantized_weights(library: str) -> str:
    """Return the quantized weights of a library; empty for floating point."""
    weights = library.rpartition("-")[2]
    return weights if weights in QUANTIZED else ""


SMALL_GPTJ = {
    "num_hidden_layers": 6,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "intermediate_size": 2048,
    "fraction": 0.5,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "gpt-j-small": ("gptj", SMALL_GPTJ),
    "smollm2-135m": ("llama", {}),
    "t5-small": ("t5", {}),
    "bart-base": ("bart", {}),
}
"""Models by name: their families, and the differences from a preset."""

PRESETS = {"gpt-j-small": "gpt-j-6b"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationBench(DeviceBench):
    """Greedy generation by every model for each batch size, and of one text with beams."""

    models: tuple[str, ...] = ("gpt2", "gpt-j-small", "t5-small", "bart-base")
    libraries: tuple[str, ...] = ("transformers", "polyformer")
    batches: tuple[int, ...] = (1, 8)  # texts per batch
    beams: tuple[int, ...] = (4,)  # of one text
    prompt: int = 24  # tokens
    new_tokens: int = 64
    layers: int | None = None  # of each stack; by default the model's
    repeats: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beams and min(self.beams) < 2:
            raise InputError(f"beams: expected 2 or more, got {list(self.beams)}")
        check_names("model", self.models, MODELS)
        check_names("library", self.libraries, LIBRARIES)

    def rows(self) -> Iterator[Row]:
        """Yield a row for each model, with a case for each way to generate."""
        ours = [name for name in self.libraries if name.startswith(OURS)]
        peers = [name for name in self.libraries if name not in ours]
        plain = {peer: f"{OURS}-{quantized_weights(peer)}" for peer in peers}
        pairs = [(plain[peer] if plain[peer] in ours else OURS, peer) for peer in peers]
        pairs += [(name, OURS) for name in ours if name != OURS]
        for name in ours:
            if name.startswith((COMPILED, WINDOWED)):
                same = quantized_weights(name)
                pairs += [(name, peer) for peer in peers if quantized_weights(peer) == same]
        for name in self.models:
            what = f"{name}, {self.new_tokens} tokens after {self.prompt}"
            yield Row(name, what, functools.partial(self._cases, name), pairs, repeats=self.repeats)

    def _cases(self, name: str) -> Iterator[Case]:
        sides = pair(name, self)
        writer = functools.cache(lambda library: LIBRARIES[library](sides))
        weights = sum(parameter.numel() * parameter.element_size() for parameter in sides.ours.parameters())
        ways = {f"{batch} texts" if batch > 1 else "one text": (batch, 1) for batch in self.batches}
        ways |= {f"one text, {beams} beams": (1, beams) for beams in self.beams}
        for way, (batch, beams) in ways.items():
            ids = torch.randint(5, 1000, (batch, self.prompt), device=self.device)
            yield Case(
                {library: self._make(writer, library, ids, beams) for library in self.libraries},
                way,
                work={"tokens": batch * self.new_tokens, "GB of weights": weights * self.new_tokens / 1e9},
            )

    def _make(self, writer: Callable[[str], Write], library: str, ids: Tensor, beams: int) -> Make:
        return lambda: functools.partial(writer(library), ids, self.new_tokens, beams)


def pair(name: str, config: GenerationBench) -> Pair:
    """Return the model with random weights."""
    kind, changes = MODELS[name]
    shape = model_config(PRESETS.get(name, name), changes)
    if config.layers is not None:
        shape = shape.override("num_hidden_layers", config.layers)
    both = Pair.of(FAMILIES[kind], shape, **config.place)
    return Pair(*(model and model.eval() for model in (both.ours, both.theirs)))


run = runner(GenerationBench)
