"""What transformers 4.35 computes with tiny Transformer-XLs: makes transfo_xl.safetensors, beside this file.

Later versions of transformers lack the model. The wheel runs in a folder of its own beside any torch:

    pip install --no-deps --target DIR transformers==4.35.2 tokenizers==0.15.2 huggingface-hub==0.20.3
    PYTHONPATH=DIR python record_transfo_xl.py

Of every configuration: weights (float32), three segments' ids, and in float64 what follows from an empty
memory (the authors' PyTorch code) and from one of zeros (transformers' own beginning): log-probabilities,
loss, memory; and the tokens that are most likely in turn. The sinusoids' frequencies, a buffer of float32,
are made in float64, and masked scores, which the model rounds to float32, stay in float64.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import TransfoXLConfig, TransfoXLForSequenceClassification, TransfoXLLMHeadModel

VOCAB, ROWS, LENGTHS, MEMORY, STEPS = 24, 2, (6, 3, 5), 5, 7
TINY = {
    "vocab_size": VOCAB,
    "cutoffs": [6, 14],
    "d_model": 8,
    "d_embed": 8,
    "n_head": 2,
    "d_head": 3,
    "d_inner": 10,
    "n_layer": 2,
    "mem_len": MEMORY,
    "div_val": 2,
    "clamp_len": -1,
    "same_length": False,
    "trainer_compatible": True,
}
CASES = {
    "div_val_2": {},
    "div_val_1": {"div_val": 1, "same_length": True},
    "div_val_4": {"div_val": 4, "d_embed": 16, "proj_share_all_but_first": False},
    "narrow": {"div_val": 1, "d_embed": 6, "clamp_len": 4},
    "untied": {"tie_word_embeddings": False, "untie_r": False, "clamp_len": 2},
    "plain": {"cutoffs": [], "div_val": 1, "pre_lnorm": True},
    "pre_lnorm": {"pre_lnorm": True, "same_length": True, "clamp_len": 3, "layer_norm_epsilon": 0.01},
}


def shaken(model: torch.nn.Module) -> torch.nn.Module:
    """In evaluation and float64, with float32 weights that are all away from their initial values."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter + 0.3 * torch.randn_like(parameter))
    model = model.double().eval()
    width = model.config.d_model
    frequencies = 1 / 10000 ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
    model.transformer.pos_emb.inv_freq.copy_(frequencies)
    return model


@torch.no_grad()
def read(model: torch.nn.Module, ids: list[Tensor], mems: list[Tensor]) -> dict[str, Tensor]:
    """Segment after segment."""
    result = {}
    for number, segment in enumerate(ids):
        result[f"logits.{number}"] = model(segment, mems=mems).prediction_scores
        output = model(segment, mems=mems, labels=segment.clone())
        result[f"loss.{number}"], mems = output.loss, output.mems
    return result | {f"memory.{layer}": tensor.transpose(0, 1) for layer, tensor in enumerate(mems)}


@torch.no_grad()
def greedy(model: torch.nn.Module, ids: Tensor, mems: list[Tensor]) -> Tensor:
    """The most likely tokens, one after the other."""
    text, new = ids, ids
    for _ in range(STEPS):
        output = model(new, mems=mems)
        new, mems = output.prediction_scores[:, -1:].argmax(-1), output.mems
        text = torch.cat([text, new], 1)
    return text


def main() -> None:
    """Record every case."""
    torch.Tensor.float = lambda scores: scores  # type: ignore[method-assign]
    tensors: dict[str, Tensor] = {}
    configs = {}
    for name, changes in CASES.items():
        config = TransfoXLConfig(**(TINY | changes))
        model = shaken(TransfoXLLMHeadModel(config))
        configs[name] = config.to_dict() | {"architectures": ["TransfoXLLMHeadModel"]}
        torch.manual_seed(1)
        ids = [torch.randint(VOCAB, (ROWS, length)) for length in LENGTHS]
        empty = [torch.zeros(0, ROWS, config.d_model, dtype=torch.float64)] * config.n_layer
        zeros = [torch.zeros(MEMORY, ROWS, config.d_model, dtype=torch.float64)] * config.n_layer
        record = {f"ids.{number}": segment for number, segment in enumerate(ids)}
        record |= {f"empty.{key}": tensor for key, tensor in read(model, ids, empty).items()}
        record |= {f"zeros.{key}": tensor for key, tensor in read(model, ids, zeros).items()}
        record["greedy"] = greedy(model, ids[0], empty)
        record |= {f"weights.{key}": tensor.to(torch.float32) for key, tensor in model.state_dict().items()}
        tensors |= {f"{name}/{key}": tensor.contiguous().clone() for key, tensor in record.items()}
    config = TransfoXLConfig(**TINY, num_labels=3, pad_token_id=None)
    model = shaken(TransfoXLForSequenceClassification(config))
    configs["classes"] = config.to_dict() | {"architectures": ["TransfoXLForSequenceClassification"]}
    empty = [torch.zeros(0, 1, config.d_model, dtype=torch.float64)] * config.n_layer
    with torch.no_grad():
        tensors["classes/ids.0"] = ids[0][:1].clone()
        tensors["classes/logits"] = model(ids[0][:1], mems=empty).logits
    tensors |= {
        f"classes/weights.{key}": x.to(torch.float32).clone() for key, x in model.state_dict().items()
    }
    file = Path(__file__).with_name("transfo_xl.safetensors")
    save_file(tensors, file, metadata={"configs": json.dumps(configs)})


if __name__ == "__main__":
    main()
