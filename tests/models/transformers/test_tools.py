"""sentence-transformers and lm-eval, both real, on a folder that a wrapped model was saved to."""

from pathlib import Path
from typing import Any

import pytest
import torch
from twins import transformers

from polyformer.data import TokenizerConfig
from polyformer.data.tokenizers import build_tokenizer
from polyformer.models import transformers as hub
from polyformer.models.presets import create_model

SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 60,
    "max_position_embeddings": 40,
}
TEXTS = [f"line {i} of a small text" for i in range(60)]


def saved(preset: str, folder: Path, **options: Any) -> Any:
    torch.manual_seed(0)
    model = hub.wrap(create_model(preset, **SIZES, **options).eval())
    model.save_pretrained(folder)
    build_tokenizer(TokenizerConfig(algorithm="wordpiece", vocab_size=60), TEXTS).save(folder)
    return model


@pytest.mark.filterwarnings("ignore")  # of the libraries' own, of each other
def test_sentence_transformers(tmp_path: Path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    model = saved("bert-base", tmp_path, head={"kind": "embed"})
    embedder = sentence_transformers.SentenceTransformer(str(tmp_path), device="cpu")
    pair = ["a text", TEXTS[3]]
    actual = embedder.encode(pair, convert_to_tensor=True)
    inputs = transformers.AutoTokenizer.from_pretrained(tmp_path)(pair, padding=True, return_tensors="pt")
    hidden, mask = model(**inputs).last_hidden_state, inputs["attention_mask"].unsqueeze(-1)
    torch.testing.assert_close(actual, (hidden * mask).sum(1) / mask.sum(1), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_lm_eval(tmp_path: Path):
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model = saved("gpt2", tmp_path)
    harness = HFLM(pretrained=str(tmp_path), device="cpu", batch_size=2)
    pairs = [("line 3 of", " a small text"), ("a", " text")]
    asked = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    ids = [harness.tok_encode(part) for part in pairs[0]]
    with torch.no_grad():
        chances = model(torch.tensor([ids[0] + ids[1]])).logits[0].log_softmax(-1)
    start = len(ids[0]) - 1
    expected = sum(float(chances[start + i, token]) for i, token in enumerate(ids[1]))
    assert harness.loglikelihood(asked)[0][0] == pytest.approx(expected, abs=1e-4)
    request = Instance("generate_until", {}, (pairs[0][0], {"until": ["@"], "max_gen_toks": 5}), 0)
    tokens = model.generate(torch.tensor([ids[0]]), max_new_tokens=5, do_sample=False)[0, len(ids[0]) :]
    assert harness.generate_until([request]) == [harness.tok_decode(tokens)]
