"""Servers of other models than chat models, and lm-eval as a client."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("prometheus_client")
openai = pytest.importorskip("openai")

from test_server import client_of, sent, served  # noqa: E402

import polyformer  # noqa: E402
from chat_models import TEXT, TINY, chat_folder  # noqa: E402
from polyformer.data import Tokenizer, TokenizerConfig  # noqa: E402
from polyformer.models.presets import create_model  # noqa: E402


def test_vectors_of_an_encoder(tmp_path: Path):
    tokenizer = Tokenizer.train(TokenizerConfig(algorithm="wordpiece", vocab_size=120, lowercase=True), TEXT)
    tokenizer.save(tmp_path)
    torch.manual_seed(0)
    create_model("bert-base", vocab_size=len(tokenizer), **TINY).save_pretrained(tmp_path, format="hub")
    texts = ["Anna flew to Oslo", "Tom"]
    expected = polyformer.load(tmp_path, "cpu").embed(texts, "mean")
    with served(tmp_path, "--pooling", "mean", key=None) as (_, address):
        client = client_of(address)
        forms: list[dict[str, Any]] = [{}, {"encoding_format": "float"}]  # by default it asks for base64
        for form in forms:
            reply = client.embeddings.create(model="tiny", input=texts, **form)
            vectors = np.array([item.embedding for item in reply.data], dtype=np.float32)
            np.testing.assert_allclose(vectors, expected, rtol=1e-5)
        assert reply.usage.prompt_tokens == reply.usage.total_tokens > 4
        single = client.embeddings.create(model="tiny", input="Tom")
        np.testing.assert_allclose(single.data[0].embedding, expected[1], rtol=1e-4)
        wrong: list[dict[str, Any]] = [{"input": [5, 6]}, {"input": []}, {"input": "a", "dimensions": 5}]
        for change in wrong:
            with pytest.raises(openai.BadRequestError):
                client.embeddings.create(model="tiny", **change)
        with pytest.raises(openai.BadRequestError, match="generates no texts"):
            client.completions.create(model="tiny", prompt="a")
        assert sent(address, "GET", "/metrics", key=None)[0] == 200


def test_a_model_without_a_chat_template_or_joining_states(tmp_path: Path):
    """A recurrent model of polyformer's own format: batches of the requests that wait."""
    torch.manual_seed(0)
    tokenizer = Tokenizer.train(TokenizerConfig(vocab_size=300), TEXT)
    model = create_model("decoder-tiny", attention="gla", vocab_size=len(tokenizer), **TINY).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save(tmp_path)
    loaded = polyformer.load(tmp_path, "cpu")
    expected = [loaded.generate(text, 12).removeprefix(text) for text in ("Anna", "Tom and Anna")]
    with served(tmp_path, key=None) as (program, address):
        reply = client_of(address).completions.create(
            model="tiny", prompt=["Anna", "Tom and Anna"], max_tokens=12
        )
        assert [choice.text for choice in reply.choices] == expected
        with pytest.raises(openai.BadRequestError, match="no chat template"):
            client_of(address).chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "a"}]
            )
        assert "cannot join a batch" in Path(program.folder.name, "stderr").read_text()


def test_lm_eval_scores_and_generates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its `local-completions` with the tokenizer of the folder: log-probabilities and greedy texts."""
    pytest.importorskip("transformers")
    evaluation = pytest.importorskip("lm_eval.models.openai_completions")
    from lm_eval.api.instance import Instance

    monkeypatch.setenv("OPENAI_API_KEY", "none")
    folder = chat_folder(tmp_path)
    loaded = polyformer.load(folder, "cpu")
    with served(folder, key=None) as (_, address):
        harness = evaluation.LocalCompletionsAPI(
            base_url=f"{address}/v1/completions",
            model="tiny",
            tokenizer=str(folder),
            tokenizer_backend="huggingface",
            max_length=200,
        )
        pairs = [("Anna and", " Tom flew"), ("Oslo", " twice; fine")]
        requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
        scores = harness.loglikelihood(requests, disable_tqdm=True)
        for (context, rest), (value, _) in zip(pairs, scores):
            whole, start = (loaded.task.tokenizer.encode(text) for text in (context + rest, context))
            logs = loaded.model(torch.tensor([whole])).logits[0].log_softmax(-1)
            own = logs[:-1].gather(1, torch.tensor(whole[1:]).unsqueeze(1)).squeeze(1)[len(start) - 1 :]
            assert value == pytest.approx(own.sum().item(), rel=1e-4)
        asked = Instance("generate_until", {}, ("Anna and", {"until": ["zzz"], "max_gen_toks": 9}), 0)
        text = harness.generate_until([asked], disable_tqdm=True)[0]
        assert text == loaded.generate("Anna and", 9, do_sample=False).removeprefix("Anna and")
