"""llama.cpp in `bench generation`: GPT-2 as a GGUF file, written with the package `gguf`."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyformer.bench.benchmark_case import AbsentError

LAYER = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
WHOLE = {"wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm"}
"""What transformers' GPT-2 calls its parts, and a GGUF file."""


def llama_cpp(model: Any, weights: str) -> Callable[[Tensor, int, int], Tensor]:
    """A writer for transformers' GPT-2, one text at a time; `weights`: a type of GGUF's, "F32" or "Q8_0"."""
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
        loaded.reset()  # or it would remember the prompt
        tokens = loaded.generate(ids[0].tolist(), temp=0.0, repeat_penalty=1.0)
        return torch.tensor([[next(tokens) for _ in range(count)]])

    return write


def write_gguf(model: Any, weights: str, file: Path) -> None:
    """transformers' GPT-2 as a GGUF file without a tokenizer; matrices lie [outputs, inputs] there."""
    import gguf  # pyright: ignore[reportMissingImports]

    config, kind = model.config, gguf.GGMLQuantizationType[weights]
    writer = gguf.GGUFWriter(str(file), "gpt2")
    writer.add_block_count(config.n_layer)
    writer.add_context_length(config.n_positions)
    writer.add_embedding_length(config.n_embd)
    writer.add_feed_forward_length(4 * config.n_embd)
    writer.add_head_count(config.n_head)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
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
