"""Who writes in `bench generation`: ours and public libraries, from the same random weights.

A library gets a `Pair` and returns a function (ids [B, P], tokens, beams) -> tokens [B, N]; it raises
`AbsentError` or `ImportError` where it cannot take part.
"""

import copy
import dataclasses
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyformer.bench.benchmark_case import AbsentError
from polyformer.bench.llama_cpp_peer import llama_cpp
from polyformer.generation import BeamConfig, GenerationConfig, SpecialIds
from polyformer.model import Transformer

Write = Callable[[Tensor, int, int], Tensor]


@dataclasses.dataclass(frozen=True)
class Pair:
    """One model: ours, and transformers' where it is installed."""

    ours: Transformer
    theirs: Any = None

    def transformers_model(self) -> Any:
        """Theirs; `AbsentError` without it."""
        if self.theirs is None:
            raise AbsentError("transformers is not installed (pip install 'polyformer[peers]')")
        return self.theirs


def ours(pair: Pair) -> Write:
    """polyformer."""

    def write(ids: Tensor, count: int, beams: int) -> Tensor:
        beam = BeamConfig()
        if beams > 1:
            beam = BeamConfig(
                num_beams=beams, normalization="length", length_penalty=1.0, early_stopping=False
            )
        asked = GenerationConfig(max_new_tokens=count, special=SpecialIds(eos=()), beam=beam)
        return pair.ours.generate(ids, config=asked).sequences[:, -count:]

    return write


def ours_int8(pair: Pair) -> Write:
    """polyformer with weights in int8."""
    return _ours_with(pair, "int8")


def ours_bfloat16(pair: Pair) -> Write:
    """polyformer with weights in bfloat16."""
    if not (torch.cuda.is_available() or torch.cpu._is_avx512_bf16_supported()):
        raise AbsentError("this processor has no bfloat16")
    return _ours_with(pair, "bfloat16")


def _ours_with(pair: Pair, weights: str) -> Write:
    from polyformer.model.weights import with_weights  # pyright: ignore[reportMissingImports]

    return ours(dataclasses.replace(pair, ours=with_weights(copy.deepcopy(pair.ours), weights)))


def transformers(pair: Pair) -> Write:
    """transformers as it comes."""
    return _transformers(pair.transformers_model())


def transformers_compiled(pair: Pair) -> Write:
    """transformers with a cache of fixed size, its steps compiled, which it does by itself on a GPU only."""
    model = pair.transformers_model()
    from transformers import CompileConfig

    compiled: Any = CompileConfig(fullgraph=False, dynamic=False, mode="default")
    compiled._compile_all_devices = True
    return _transformers(model, cache_implementation="static", compile_config=compiled)


def _transformers(model: Any, **how: Any) -> Write:
    settings = model.generation_config
    settings.eos_token_id = settings.forced_eos_token_id = None

    def write(ids: Tensor, count: int, beams: int) -> Tensor:
        asked = {"do_sample": False, "max_new_tokens": count, "num_beams": beams, "pad_token_id": 0}
        return model.generate(ids, attention_mask=torch.ones_like(ids), **asked, **how)[:, -count:]

    return write


def ctranslate2(pair: Pair) -> Write:
    """CTranslate2 with weights in float32."""
    return _ctranslate2(pair, "float32")


def ctranslate2_int8(pair: Pair) -> Write:
    """CTranslate2 with weights and their inputs in int8."""
    return _ctranslate2(pair, "int8")


def _ctranslate2(pair: Pair, weights: str) -> Write:
    """A token's text is its number, for CTranslate2 takes texts; its converter reads a saved model."""
    model = pair.transformers_model()
    if torch.device(model.device).type != "cpu":
        raise AbsentError("it is measured on a CPU alone")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ctranslate2
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
        ctranslate2.converters.TransformersConverter(str(saved)).convert(str(converted), quantization=weights)
        two_stacks = model.config.is_encoder_decoder
        kind = ctranslate2.Translator if two_stacks else ctranslate2.Generator
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


def llama_cpp_float32(pair: Pair) -> Write:
    """llama.cpp with weights in float32."""
    return llama_cpp(pair.transformers_model(), "F32")


def llama_cpp_int8(pair: Pair) -> Write:
    """llama.cpp with weights in int8, 32 to a scale."""
    return llama_cpp(pair.transformers_model(), "Q8_0")


LIBRARIES: dict[str, Callable[[Pair], Write]] = {
    "transformers": transformers,
    "transformers-compiled": transformers_compiled,
    "ctranslate2": ctranslate2,
    "ctranslate2-int8": ctranslate2_int8,
    "llama.cpp": llama_cpp_float32,
    "llama.cpp-int8": llama_cpp_int8,
    "polyformer": ours,
    "polyformer-bfloat16": ours_bfloat16,
    "polyformer-int8": ours_int8,
}
"""By name; what is behind a hyphen says the weights, where they are not in float32, or how it runs."""
