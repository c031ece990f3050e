"""Greedy generation by a language model of GPT-2's shape, beside transformers' own with the same weights."""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

from polyformer.bench.timing import in_turn, median
from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.generation import GenerationConfig
from polyformer.model import Transformer
from polyformer.presets import create_model


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationBench(Config):
    """Random weights and prompts; no end token, so that every text has all its tokens."""

    batches: tuple[int, ...] = (1, 8)  # texts at a time
    prompt: int = 24  # tokens
    new_tokens: int = 64
    layers: int = 12
    device: str = "cpu"
    dtype: str = "float32"
    threads: int | None = None  # of a CPU; by default torch's own choice
    repeats: int = 5

    def __post_init__(self) -> None:
        for name in ("prompt", "new_tokens", "layers", "repeats"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}: expected 1 or more, got {getattr(self, name)}")
        if self.threads is not None and self.threads < 1:
            raise InputError(f"threads: expected 1 or more, got {self.threads}")
        if not self.batches or min(self.batches) < 1:
            raise InputError(f"batches: expected sizes of 1 or more, got {list(self.batches)}")


@dataclasses.dataclass(frozen=True)
class Measured:
    """One model writing one batch. `rate`: bytes of weights read a second, every weight once a token."""

    model: str
    batch: int
    seconds: float
    tokens_per_second: float
    rate: float

    def __str__(self) -> str:
        return (
            f"{self.model:13} batch {self.batch:3} {self.seconds * 1e3:9.1f} ms "
            f"{self.tokens_per_second:8.1f} tokens/s {self.rate / 1e9:7.1f} GB/s of weights"
        )


def run(config: GenerationBench) -> list[Measured]:
    """The median time of every model and batch; prints them with their ratios."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    dtype = getattr(torch, config.dtype)
    positions = max(1024, config.prompt + config.new_tokens)
    ours = create_model("gpt2", num_hidden_layers=config.layers, max_position_embeddings=positions)
    models: dict[str, nn.Module] = {"polyformer": ours}
    try:
        models = {"transformers": transformers_twin(ours), **models}
    except ImportError:
        print("transformers is not installed: no comparison (pip install 'polyformer[peers]')")
    models = {name: model.to(config.device, dtype).eval() for name, model in models.items()}
    return [one for batch in config.batches for one in _measure(models, batch, config)]


def transformers_twin(ours: Transformer) -> nn.Module:
    """transformers' GPT-2 with the shape and the weights of `ours`, a model of that preset's layout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    shape, stack = ours.config, ours.config.decoder
    assert stack is not None
    theirs = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=shape.vocab_size, n_positions=shape.max_position_embeddings, n_embd=shape.hidden_size,
            n_layer=stack.num_hidden_layers, n_head=stack.attention.num_attention_heads,
            n_inner=len(ours.get_parameter("decoder.layers.0.feedforward.up.weight")),
            bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip
    theirs.load_state_dict(renamed(ours), strict=True)
    return theirs


def renamed(ours: Transformer) -> dict[str, Tensor]:
    """The weights under transformers' names; its matrices are [in, out], query, key and value joined."""
    parts = {
        "attention.output": "attn.c_proj", "feedforward.up": "mlp.c_fc", "feedforward.down": "mlp.c_proj",
        "block.norms.0": "ln_1", "block.norms.1": "ln_2",
    }  # fmt: skip
    own = ours.state_dict()
    table = own["tokens.weight"]
    result = {"transformer.wte.weight": table, "lm_head.weight": table}
    result["transformer.wpe.weight"] = own["decoder.position.tables.0.weight"]
    for kind in ("weight", "bias"):
        result[f"transformer.ln_f.{kind}"] = own[f"decoder.final_norm.{kind}"]
        for layer in range(len(ours.get_submodule("decoder.layers"))):  # type: ignore[arg-type]
            here, there = f"decoder.layers.{layer}.", f"transformer.h.{layer}."
            joined = [own[f"{here}attention.{part}.{kind}"] for part in ("query", "key", "value")]
            result[f"{there}attn.c_attn.{kind}"] = torch.cat(joined).t()
            result |= {
                f"{there}{their}.{kind}": own[f"{here}{our}.{kind}"].t() for our, their in parts.items()
            }
    return {name: tensor.contiguous() for name, tensor in result.items()}


def _measure(models: dict[str, nn.Module], batch: int, config: GenerationBench) -> list[Measured]:
    """All models on the same prompts."""
    vocabulary = 50257
    ids = torch.randint(vocabulary, (batch, config.prompt), device=config.device)
    runs = {name: _writing(model, ids, config.new_tokens) for name, model in models.items()}
    texts = [write() for write in runs.values()]
    results = []
    for name, seconds in in_turn(runs, config.repeats).items():
        middle = median(seconds)
        weights = sum(one.numel() * one.element_size() for one in models[name].parameters())
        measured = Measured(
            name, batch, middle, batch * config.new_tokens / middle, weights * config.new_tokens / middle
        )
        print(measured)
        results.append(measured)
    if len(results) == 2:
        same = "the same tokens" if torch.equal(*texts) else "tokens that differ"
        print(f"polyformer is {results[0].seconds / results[1].seconds:.2f} times as fast, with {same}")
    return results


def _writing(model: nn.Module, ids: Tensor, count: int) -> Callable[[], Tensor]:
    """A function that writes `count` tokens after each row of `ids` and returns the texts."""
    if isinstance(model, Transformer):
        return lambda: model.generate(ids, config=GenerationConfig(max_new_tokens=count)).sequences
    mask = torch.ones_like(ids)
    return lambda: model.generate(  # type: ignore[operator]
        ids, attention_mask=mask, do_sample=False, max_new_tokens=count, pad_token_id=0
    )
