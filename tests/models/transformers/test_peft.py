"""Every PEFT method that trains and writes with transformers' model does so with ours."""

from itertools import cycle
from typing import Any

import pytest
import torch
from twins import texts, twins

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:.is_gradient_checkpointing:FutureWarning"
    ),  # PEFT asks transformers so
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
]

MODELS = {
    "CAUSAL_LM": ("gptj", "ForCausalLM", ["q_proj", "v_proj"], ["ln_1", "ln_f"], "wte"),
    "SEQ_2_SEQ_LM": (
        "t5",
        "ForConditionalGeneration",
        ["q", "v"],
        ["layer_norm", "final_layer_norm"],
        "shared",
    ),
}
LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("LoraConfig", {"r": 2}),
    "dora": ("LoraConfig", {"r": 2, "use_dora": True}),
    "adalora": ("AdaLoraConfig", {"total_step": 10}),
    "ia3": ("IA3Config", {"feedforward_modules": []}),
    "loha": ("LoHaConfig", {"r": 2}),
    "lokr": ("LoKrConfig", {"r": 2}),
    "oft": ("OFTConfig", {"r": 0, "oft_block_size": 4}),
    "boft": ("BOFTConfig", {"boft_block_size": 4}),
    "vera": ("VeraConfig", {"r": 2}),
    "hra": ("HRAConfig", {"r": 2}),
    "fourier": ("FourierFTConfig", {"n_frequency": 4}),
    "miss": ("MissConfig", {"r": 2}),
    "poly": ("PolyConfig", {"r": 2, "n_tasks": 2, "n_skills": 2}),
}
PROMPTS: dict[str, tuple[str, dict[str, Any]]] = {
    "prompt": ("PromptTuningConfig", {"num_virtual_tokens": 3}),
    "prefix": ("PrefixTuningConfig", {"num_virtual_tokens": 3}),
    "p-tuning": ("PromptEncoderConfig", {"num_virtual_tokens": 3, "encoder_hidden_size": 8}),
    "multitask": ("MultitaskPromptTuningConfig", {"num_virtual_tokens": 3, "num_tasks": 2}),
    "cpt": ("CPTConfig", {"cpt_token_ids": [3, 4], "cpt_mask": [1, 1], "cpt_tokens_type_mask": [1, 4]}),
}
NEEDS_TASKS = ("multitask", "poly")


def trained(model: Any, config: Any, more: dict[str, Any]) -> tuple[list[float], list[float], torch.Tensor]:
    """Losses and norms of gradients of three steps, and a text."""
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, config)
    chosen = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer, ids = torch.optim.SGD(chosen, 0.3), texts(2, 8)
    losses, norms = [], []
    for _ in range(3):
        optimizer.zero_grad()
        loss = adapted(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, **more).loss
        loss.backward()
        norms.append(
            float(
                torch.stack(
                    [parameter.grad.norm() for parameter in chosen if parameter.grad is not None]
                ).norm()
            )
        )
        optimizer.step()
        losses.append(loss.item())
    adapted.eval()
    tokens = adapted.generate(
        input_ids=ids[:, :5],
        attention_mask=torch.ones(2, 5, dtype=torch.long),
        max_new_tokens=4,
        do_sample=False,
        **more,
    )
    return losses, norms, tokens


@pytest.mark.parametrize(
    ("method", "task"),
    [("lora", "SEQ_2_SEQ_LM"), *zip([*LAYERS, "all-linear", "norms", "tokens"], cycle(MODELS))],
)
def test_adapted_layers(task: str, method: str):
    """They learn: where layers lie in another order their random starts differ, and so the losses after."""
    family, kind, layers, norms, table = MODELS[task]
    name, options = LAYERS.get(method, ("LoraConfig", {"r": 2}))
    targets: tuple[Any, Any] = (layers, ["query", "value"])
    if method == "all-linear":
        targets = ("all-linear", "all-linear")
    elif method == "norms":
        name, options, targets = "LNTuningConfig", {}, (norms, [r"norms.0", "final_norm"])
    elif method == "tokens":
        name, options, targets = "TrainableTokensConfig", {"token_indices": [5, 6]}, ([table], ["tokens"])
    more = {"task_ids": torch.zeros(2, dtype=torch.long)} if method in NEEDS_TASKS else {}
    runs = []
    for model, target in zip(reversed(twins(family, kind, torch.float32)), targets):
        config = getattr(peft, name)(target_modules=target, task_type=task, **options)
        runs.append(trained(model, config, more))
    (theirs, _, _), (losses, gradients, tokens) = runs
    assert losses[-1] < losses[0]
    assert all(gradients)
    assert len(tokens) == 2
    if method != "fourier":  # it does not start as the model
        assert losses[0] == pytest.approx(theirs[0], rel=1e-4)


@pytest.mark.parametrize(
    ("task", "method"),
    [(task, method) for task in MODELS for method in PROMPTS if method != "cpt" or task == "CAUSAL_LM"],
)
def test_prompts(task: str, method: str):
    """Their parameters lie outside the model: all is equal."""
    family, kind, *_ = MODELS[task]
    name, options = PROMPTS[method]
    more = {"task_ids": torch.zeros(2, dtype=torch.long)} if method in NEEDS_TASKS else {}
    runs = [
        trained(model, getattr(peft, name)(task_type=task, **options), more)
        for model in twins(family, kind, torch.float32)
    ]
    (ours, gradients, tokens), (theirs, expected, other) = runs
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert gradients == pytest.approx(expected, rel=1e-3)
    assert torch.equal(tokens, other)


def test_merged_adapters_are_the_model():
    ours, _ = twins("gptj", "ForCausalLM", torch.float32)
    config = peft.LoraConfig(
        r=2, target_modules=["query", "value"], task_type="CAUSAL_LM", init_lora_weights=False
    )
    adapted = peft.get_peft_model(ours, config)
    expected = adapted(input_ids=texts()).logits
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(input_ids=texts()).logits, expected, rtol=1e-4, atol=1e-4)
