"""LLaDA: a masked diffusion model with the layers of Llama and attention in both directions.

Nie et al. 2025. The code of its classes is with the files on the Hub and is not part of transformers; it
descends from OLMo's, with that code's names of options and tensors. Options of OLMo that the released models
do not use are refused: other blocks and norms, biases, ALiBi, norms of queries and keys, scaled logits.
"""

from typing import ClassVar

from polyformer.models.checkpoints.config_mapping import Option, Tree, check_same
from polyformer.models.checkpoints.family import Family, Task, register
from polyformer.models.checkpoints.values import options
from polyformer.models.presets import model_config
from polyformer.nn.heads import LanguageModelConfig


@register
class Llada(Family):
    """An encoder that writes by filling masks (`models.generation.denoising`)."""

    model_type = "llada"
    class_prefix = "LLaDA"
    paper = "Nie et al. 2025"
    objective = "masked diffusion"
    base_model_prefix = "model.transformer"
    outside = True
    template = model_config("llada-8b")
    config_mapping = options(
        "encoder",
        {"vocab_size": 126464, "d_model": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": None},
        {"mlp_hidden_size": 12288, "max_sequence_length": 4096, "rms_norm_eps": 1e-5, "init_std": 0.02},
        {"attention_dropout": 0.0, "residual_dropout": 0.0, "embedding_dropout": 0.0},
        {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "mask_token_id": 126336},
        {"weight_tying": False},
        Option("rope_theta", 10000.0, ("encoder.position.base",)),
    )
    required: ClassVar = {
        **{"block_type": "llama", "activation_type": "silu", "layer_norm_type": "rms", "rope": True},
        **{"layer_norm_with_affine": True, "attention_layer_norm": False, "bias_for_layer_norm": False},
        **{"include_bias": False, "include_qkv_bias": False, "alibi": False, "multi_query_attention": None},
        **{"scale_logits": False, "input_emb_norm": False, "block_group_size": 1},
    }
    other_options: ClassVar = {"embedding_size": None}
    ignored_options = (
        *("alibi_bias_max", "attention_layer_norm_with_affine", "flash_attention", "init_cutoff_factor"),
        *("init_device", "init_fn", "mlp_ratio", "precision", "rope_full_precision", "use_cache"),
    )
    key_mapping: ClassVar = {
        "wte": "tokens",
        "blocks.{i}.[q|k|v]_proj": "encoder.layers.{i}.attention.[query|key|value]",
        "blocks.{i}.attn_out": "encoder.layers.{i}.attention.output",
        "blocks.{i}.[ff|up]_proj": "encoder.layers.{i}.feedforward.[gate|up]",
        "blocks.{i}.ff_out": "encoder.layers.{i}.feedforward.down",
        "blocks.{i}.[attn|ff]_norm": "encoder.layers.{i}.block.norms.[0|1]",
        "ln_f": "encoder.final_norm",
    }
    tasks: ClassVar = {
        "ModelLM": Task(
            LanguageModelConfig(),
            {"{base}ff_out": "head"},
            tied_keys={"model.transformer.ff_out.weight": "model.transformer.wte.weight"},
        )
    }
    sizes = ("llada-8b",)

    def check(self, hub: Tree) -> None:
        """Raise `InputError` for a token table with more rows than tokens."""
        check_same("embedding_size", "vocab_size", hub)

    def write_other_options(self, tree: Tree) -> Tree:
        """Return the rows of the token table."""
        return {"embedding_size": tree["vocab_size"]}
