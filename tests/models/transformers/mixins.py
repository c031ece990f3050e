"""transformers' own mixin of model tests, run on wrapped models by `make mixins`.

The tests are in transformers' source distribution, not in its wheel; make unpacks it into build/mixins. Its
mixins of generation and export are in neither: test_generation.py and test_caches.py test generation.
"""

import copy
import sys
import types
import unittest
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import torch

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[3] / "build" / "mixins"), str(HERE.parent)]
for package, name, mixin in (
    ("tests.exporters", "test_export", "ExportTesterMixin"),
    ("tests.generation", "test_utils", "GenerationTesterMixin"),
):
    module: Any = types.ModuleType(f"{package}.{name}")
    setattr(module, mixin, type(mixin, (), {}))
    sys.modules |= {package: types.ModuleType(package), module.__name__: module}

from tests.test_modeling_common import ModelTesterMixin  # noqa: E402
from twins import texts, twins  # noqa: E402

OTHERS = {
    "test_model_get_set_embeddings": "expects a Linear; ours is the head or the token table",
    "test_resize_embeddings_untied": "unties by `tie_word_embeddings`, which does not change our models",
    "test_generation_tester_mixin_inheritance": "that mixin is not in the source distribution",
    "test_gradient_checkpointing_enable_disable": "looks for a layer of transformers",
    "test_training_gradient_checkpointing": "the same",
    "test_training_gradient_checkpointing_use_reentrant_false": "the same",
    "test_training_gradient_checkpointing_use_reentrant_true": "the same",
    "test_retain_grad_hidden_states_attentions": "attention weights are recorded without gradients",
    "test_sdpa_can_dispatch_non_composite_models": "looks for layers with a transformers configuration",
}
"""Tests that ask for what a wrapped model does not have, and why."""


class Wrapped(ModelTesterMixin):
    """The mixin's tests of one wrapped class."""

    family: str
    task: str

    def setUp(self) -> None:
        if self._testMethodName in OTHERS:
            self.skipTest(OTHERS[self._testMethodName])
        self.model, _ = twins(self.family, self.task, torch.float32)
        self.all_model_classes = (type(self.model),)
        self.config_tester = Mock()
        self.model_tester = types.SimpleNamespace(
            is_training=True,
            batch_size=3,
            seq_length=24,
            num_hidden_layers=2,
            hidden_size=16,
            num_attention_heads=self.model.config.num_attention_heads,
            prepare_config_and_inputs_for_common=self.inputs,
        )

    def inputs(self) -> tuple[Any, dict[str, torch.Tensor]]:
        config = copy.deepcopy(self.model.config)
        config._attn_implementation = "eager"  # attention weights are asked for in the configuration
        return config, {"input_ids": texts(), "attention_mask": torch.ones_like(texts())}

    def _prepare_for_class(self, inputs: Any, model_class: Any, return_labels: bool = False) -> Any:
        rows = {"ForSequenceClassification": torch.tensor([0, 2, 1])}
        labels = {"labels": rows.get(self.task, inputs["input_ids"])} if return_labels else {}
        return {**copy.deepcopy(inputs), **labels}


for family, task in (
    ("bert", "ForMaskedLM"),
    ("bert", "ForSequenceClassification"),
    ("gpt2", "LMHeadModel"),
    ("llama", "ForCausalLM"),
):
    title = f"Test{family.title()}{task}"
    globals()[title] = type(title, (Wrapped, unittest.TestCase), {"family": family, "task": task})
