"""transformers' models without their roundings: what they compute in float32 whatever the model's type is
computed here in that type, so that float64 is compared with float64."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import modeling_rope_utils
from transformers.loss import loss_utils
from transformers.models.bloom import modeling_bloom
from transformers.models.ctrl import modeling_ctrl
from transformers.models.deberta import modeling_deberta
from transformers.models.deberta_v2 import modeling_deberta_v2
from transformers.models.deepseek_v2 import modeling_deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.gpt_neo import modeling_gpt_neo
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.gptj import modeling_gptj
from transformers.models.led import modeling_led
from transformers.models.llama import modeling_llama
from transformers.models.longformer import modeling_longformer
from transformers.models.m2m_100 import modeling_m2m_100
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.marian import modeling_marian
from transformers.models.mistral import modeling_mistral
from transformers.models.modernbert import modeling_modernbert
from transformers.models.mt5 import modeling_mt5
from transformers.models.nemotron_h import modeling_nemotron_h
from transformers.models.olmo2 import modeling_olmo2
from transformers.models.pegasus import modeling_pegasus
from transformers.models.phi3 import modeling_phi3
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next
from transformers.models.reformer import modeling_reformer
from transformers.models.t5 import modeling_t5
from transformers.models.xglm import modeling_xglm
from transformers.models.xlm import modeling_xlm
from transformers.models.xlnet import modeling_xlnet

from polyformer.models.checkpoints import FAMILIES
from tolerances import Double, with_exact_waves

Patch = pytest.MonkeyPatch
RELEASED_TABLE = modeling_m2m_100.M2M100SinusoidalPositionalEmbedding.get_embedding
"""M2M-100's own table of positions, in float32."""


def next_tokens(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def tokens(logits: Tensor, labels: Tensor, *_: Any, **__: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def root(layer: Tensor, factor: int) -> Tensor:
    return torch.tensor(layer.size(-1) * factor, dtype=torch.float64).sqrt()


class DebertaNorm(torch.nn.LayerNorm):
    def __init__(self, size: int, eps: float = 1e-12):
        super().__init__(size, eps=eps)


class DebertaAttention(modeling_deberta.DisentangledSelfAttention):
    def __init__(self, config: Any):
        super().__init__(config)
        self.q_bias = torch.nn.Parameter(torch.zeros(config.hidden_size))
        self.v_bias = torch.nn.Parameter(torch.zeros(config.hidden_size))


class ReformerPositions(modeling_reformer.AxialPositionEmbeddings):
    def __init__(self, config: Any):
        super().__init__(config)
        kind = torch.get_default_dtype()
        self.weights = torch.nn.ParameterList([tensor.detach().to(kind) for tensor in self.weights])


def deberta(patch: Patch) -> None:
    patch.setattr(modeling_deberta, "DebertaLayerNorm", DebertaNorm)
    patch.setattr(modeling_deberta, "DisentangledSelfAttention", DebertaAttention)
    for module in (modeling_deberta, modeling_deberta_v2):
        patch.setattr(module, "scaled_size_sqrt", root)


def llama(patch: Patch) -> None:
    for module in (
        *(modeling_llama, modeling_mistral, modeling_olmo2, modeling_phi3, modeling_qwen2, modeling_qwen3),
        *(modeling_gemma3, modeling_gpt_oss, modeling_deepseek_v2, modeling_deepseek_v3, modeling_rope_utils),
    ):
        patch.setattr(module, "torch", Double())


def deepseek(patch: Patch) -> None:
    def rotated(q: Tensor, k: Tensor, turns: Tensor) -> tuple[Tensor, ...]:
        pairs = (torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) for x in (q, k))
        return tuple(torch.view_as_real(x * turns.unsqueeze(1)).flatten(3).to(q.dtype) for x in pairs)

    llama(patch)
    patch.setattr(modeling_deepseek_v2, "apply_rotary_emb", rotated)


def gemma3(patch: Patch) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self._norm(x) * (1.0 + self.weight)

    llama(patch)
    patch.setattr(modeling_gemma3.Gemma3RMSNorm, "forward", forward)


def longformer(patch: Patch, module: Any = modeling_longformer) -> None:
    functional = module.nn.functional
    plain = functional.softmax

    def softmax(scores: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        return plain(scores, dim=dim)

    fake = type("functional", (), {**vars(functional), "softmax": staticmethod(softmax)})
    patch.setattr(module.nn, "functional", fake)


def led(patch: Patch) -> None:
    longformer(patch, modeling_led)


def fairseq_waves(kind: Any) -> Callable[[Patch], None]:
    """Sinusoids in float64 in the place of a class's table, in which the padding token's row is zero."""

    def table(count: int, width: int, padding: int) -> Tensor:
        half = width // 2
        angles = torch.arange(count).double()[:, None] / 10000 ** (torch.arange(half).double() / (half - 1))
        waves = torch.cat([angles.sin(), angles.cos(), torch.zeros(count, width % 2).double()], 1)
        waves[padding] = 0
        return waves

    return lambda patch: patch.setattr(kind, "get_embedding", staticmethod(table))


def modernbert(patch: Patch) -> None:
    def rotated(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> tuple[Any, Any]:
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        turn = modeling_modernbert.rotate_half
        return q * cos + turn(q) * sin, k * cos + turn(k) * sin

    patch.setattr(modeling_modernbert, "torch", Double())
    patch.setattr(modeling_modernbert, "apply_rotary_pos_emb", rotated)
    patch.setitem(loss_utils.LOSS_MAPPING, "ForMaskedLM", tokens)


def t5(patch: Patch) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        wide = x.double() if x.dtype == torch.float64 else x.float()
        normed = x * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * normed.to(self.weight.dtype)

    for kind in (modeling_t5.T5LayerNorm, modeling_mt5.MT5LayerNorm):
        patch.setattr(kind, "forward", forward)


def in_double(patch: Patch, module: Any, *kinds: Any) -> None:
    """Casts to float32 in passes of float64 models of these classes are casts to float64."""

    def exact(plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def forward(self: Any, *inputs: Any, **named: Any) -> Any:
            with pytest.MonkeyPatch.context() as inner:
                if next(self.parameters()).dtype == torch.float64:
                    inner.setattr(module, "torch", Double())
                    inner.setattr(torch.Tensor, "float", torch.Tensor.double)
                return plain(self, *inputs, **named)

        return forward

    for kind in kinds:
        patch.setattr(kind, "forward", exact(kind.forward))


def mamba2(patch: Patch) -> None:
    in_double(patch, modeling_mamba2, modeling_mamba2.Mamba2Model, modeling_mamba2.Mamba2ForCausalLM)


def nemotron_h(patch: Patch) -> None:
    module = modeling_nemotron_h
    in_double(patch, module, module.NemotronHModel, module.NemotronHForCausalLM)


def gated_delta(module: Any, kind: str) -> Callable[[Patch], None]:
    def patched(patch: Patch) -> None:
        patch.setattr(module, "torch", Double())
        in_double(patch, module, getattr(module, kind))

    return patched


def trunk(name: str) -> Callable[[Patch], None]:
    """Of a family with `name` as its model_type: its whole trunk."""

    def patched(patch: Patch) -> None:
        module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        patch.setattr(modeling_rope_utils, "torch", Double())
        gated_delta(module, f"{FAMILIES[name].class_prefix}Model")(patch)

    return patched


def bloom(patch: Patch) -> None:
    trunk("bloom")(patch)
    patch.setattr(modeling_bloom.BloomGelu, "forward", lambda self, x: F.gelu(x, approximate="tanh"))


class Replaced:
    """torch for a module of transformers, with other functions of some names."""

    def __init__(self, **functions: Callable[..., Any]):
        vars(self).update(functions)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def xglm(patch: Patch) -> None:
    """Also the least score, which is made in float32, where that of float64 overflows."""
    fairseq_waves(modeling_xglm.XGLMSinusoidalPositionalEmbedding)(patch)
    full = functools.partial(torch.full, dtype=torch.float64)
    patch.setattr(modeling_xglm, "torch", Replaced(full=full))


def xlnet(patch: Patch) -> None:
    """Parameters in the default type, which are made in float32."""
    patch.setattr(modeling_xlnet, "torch", Replaced(FloatTensor=torch.empty))
    in_double(patch, modeling_xlnet, modeling_xlnet.XLNetModel)


class Waves(torch.nn.Module):
    """Sinusoids in float64, sines before cosines, where theirs keeps a table in float32 with the weights."""

    def __init__(self, count: int, width: int, padding: int | None = None):
        super().__init__()
        self.width = width
        self.register_buffer("weight", torch.zeros(count, width), persistent=False)

    def create_weight(self) -> Tensor:
        return torch.zeros_like(self.weight)

    def forward(self, shape: Any, past: int = 0, position_ids: Tensor | None = None) -> Tensor:
        positions = torch.arange(past, past + shape[1]) if position_ids is None else position_ids
        even = torch.arange(0, self.width, 2).double()
        angles = positions[..., None] * 10000 ** (-even / self.width)
        return torch.cat([angles.sin(), angles.cos()], -1).to(self.weight.dtype)


def waves(module: Any, kind: str) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(module, kind, Waves)


def falcon(patch: Patch) -> None:
    """Without the rounding of ALiBi to bfloat16."""
    trunk("falcon")(patch)
    patch.setattr(torch.Tensor, "bfloat16", torch.Tensor.double)


TRUNKS = (
    *(
        "bamba",
        "biogpt",
        "bloom",
        "cohere",
        "cohere2",
        "deepseek_v32",
        "esm",
        "eurobert",
        "exaone4",
        "falcon",
        "falcon_h1",
        "gemma",
        "gemma2",
        "glm4",
        "glm_moe_dsa",
    ),
    *(
        "gpt_bigcode",
        "gpt_neox",
        "granite",
        "granitemoe",
        "kimi_linear",
        "lfm2",
        "mixtral",
        "mpt",
        "nomic_bert",
        "olmo3",
        "opt",
        "phi",
        "qwen2_moe",
    ),
    *("qwen3_moe", "smollm3", "stablelm", "starcoder2"),
)
PATCHES: dict[str, Callable[[Patch], None]] = {
    "deberta": deberta,
    "deberta-v2": deberta,
    "deepseek_v2": deepseek,
    "deepseek_v3": deepseek,
    "gemma3_text": gemma3,
    "gpt_neo": lambda patch: patch.setattr(modeling_gpt_neo, "torch", Double()),
    "gpt_oss": llama,
    "gptj": lambda patch: patch.setattr(modeling_gptj, "torch", Double()),
    "llama": llama,
    "led": led,
    "longformer": longformer,
    "m2m_100": fairseq_waves(modeling_m2m_100.M2M100SinusoidalPositionalEmbedding),
    "mamba2": mamba2,
    "mistral": llama,
    "nemotron_h": nemotron_h,
    "modernbert": modernbert,
    "olmo2": llama,
    "phi3": llama,
    "qwen2": llama,
    "qwen3": llama,
    "qwen3_5_moe_text": gated_delta(modeling_qwen3_5_moe, "Qwen3_5MoeTextModel"),
    "qwen3_5_text": gated_delta(modeling_qwen3_5, "Qwen3_5TextModel"),
    "qwen3_next": gated_delta(modeling_qwen3_next, "Qwen3NextModel"),
    "reformer": lambda patch: patch.setattr(modeling_reformer, "AxialPositionEmbeddings", ReformerPositions),
    "mt5": t5,
    "t5": t5,
    **{name: trunk(name) for name in TRUNKS},
    **{"bloom": bloom, "falcon": falcon},
    "marian": waves(modeling_marian, "MarianSinusoidalPositionalEmbedding"),
    "pegasus": waves(modeling_pegasus, "PegasusSinusoidalPositionalEmbedding"),
    "xlm": lambda patch: in_double(patch, modeling_xlm, modeling_xlm.MultiHeadAttention),
    "xglm": xglm,
    "xlnet": xlnet,
}
"""Replacements in transformers' modules, for one test, by model_type."""


def with_exact_tables(theirs: Any) -> Any:
    """A model with tables of positions in float64, which its initialization makes in float32, and losses of
    language models and tags without a cast. Experts run one by one: grouped products have no float64."""
    name = theirs.config.model_type
    if hasattr(theirs.config, "num_experts_per_tok"):
        theirs.set_experts_implementation("eager")
    if name == "ctrl":
        size = theirs.config.n_positions, theirs.config.n_embd
        trunk = getattr(theirs, "transformer", theirs)
        trunk.pos_encoding = modeling_ctrl.positional_encoding(*size, torch.float64)
    if name == "gptj":
        theirs = with_exact_waves(theirs)
    own = name in ("bart", "bigbird_pegasus", "xlm")
    if type(theirs).__name__.endswith(("ForCausalLM", "LMHeadModel")) and not own:
        theirs.loss_function = next_tokens
    if type(theirs).__name__.endswith("ForTokenClassification"):
        theirs.loss_function = tokens
    return theirs
