"""The messages of the package `training`, each stated here once, in full.

Other tests of the package check the type of an error and its argument. A row is a call and its message.
"""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn

from polyformer.core.errors import InputError
from polyformer.data import Tokenizer, TokenizerConfig
from polyformer.training.config import ParallelConfig
from polyformer.training.objectives import DistillationConfig, chosen_layers, pairs_of, replaced, soft_loss
from polyformer.training.optimizers import (
    SGD,
    Adam,
    Cosine,
    Linear,
    MuonConfig,
    Noam,
    OptimizerConfig,
    ScheduleConfig,
)
from polyformer.training.recipes import ModelChoice, Recipe
from polyformer.training.recipes.recipe import absolute, with_data
from polyformer.training.rl.recording import Recording
from polyformer.training.tasks import (
    AgentConfig,
    ClassificationConfig,
    ExtractConfig,
    ImageClassificationConfig,
    ImageConfig,
    LanguageModellingConfig,
    MixturePart,
    NextSentenceConfig,
    QuestionAnsweringConfig,
    SentenceOrderConfig,
    SpanCorruptionConfig,
    SummarizationConfig,
    SuperResolutionConfig,
    TaggingConfig,
    TextToTextConfig,
    TranslationConfig,
    TranslationModellingConfig,
)

UNKNOWN = {"text": "a film", "label": "meh"}
UNKNOWN_TAG = {"tokens": ["x"], "tags": ["B-ORG"]}
UNTAGGED = {"tokens": ["x", "y"], "tags": ["O"]}
WIDE = {"image": bytes(12), "height": 3, "width": 4}


@functools.cache
def bytes_tokenizer() -> Tokenizer:
    """A tokenizer of bytes, with every special token."""
    return Tokenizer.train(TokenizerConfig(algorithm="bytes"), [])


MESSAGES: list[tuple[Callable[[], object], str]] = [
    # Options of tasks.
    (
        lambda: LanguageModellingConfig(row_length=1),
        "row_length: expected 2 or more, got 1",
    ),
    (
        lambda: LanguageModellingConfig(row_length=8, overlap=8),
        "overlap: expected 1 to 7 (row_length - 1), got 8",
    ),
    (
        lambda: LanguageModellingConfig(batch_tokens=8),
        "batch_tokens: expected row_length, 256, or more, got 8",
    ),
    (
        lambda: TranslationModellingConfig(languages=(0, -1)),
        "languages[1]: expected 0 or more, got -1",
    ),
    (
        lambda: TranslationModellingConfig(batch_tokens=100),
        "batch_tokens: expected max_length, 256, or more, got 100",
    ),
    (
        lambda: NextSentenceConfig(short_share=-1),
        "short_share: expected a share from 0 to 1, got -1",
    ),
    (
        lambda: SpanCorruptionConfig(density=0.0),
        "density: expected a share of the tokens in (0, 1), got 0.0",
    ),
    (
        lambda: SpanCorruptionConfig(batch_tokens=130),
        "batch_tokens: expected the tokens of a text before it is corrupted, 141, or more, got 130",
    ),
    (
        lambda: QuestionAnsweringConfig(max_length=64, max_question=20, stride=50),
        "stride: expected at most 41, the tokens of a text that fit next to a question "
        "(max_length - max_question - 3), got 50",
    ),
    (
        lambda: TranslationConfig(batch_tokens=100),
        "batch_tokens: expected max_length, 256, or more, got 100",
    ),
    (
        lambda: SummarizationConfig(max_length=16, max_summary=17),
        "max_summary: expected at most max_length, 16, got 17",
    ),
    (
        lambda: SummarizationConfig(max_summary=1),
        "max_summary: expected 2 or more, got 1",
    ),
    (
        lambda: ExtractConfig(sentences=0),
        "sentences: expected 1 or more, got 0",
    ),
    (
        lambda: MixturePart(form="spans", prefix="x"),
        "prefix, words: texts whose spans are removed have none; leave them out",
    ),
    (
        lambda: TextToTextConfig().own_data,
        "parts: expected a task or more; name them in a recipe, as `t5` does",
    ),
    (
        lambda: TextToTextConfig.from_dict({"parts": {"a": {"form": "tag"}}}),
        "unknown parts.a.form 'tag': expected one of 'classify', 'spans', 'summarize', 'translate'",
    ),
    (
        lambda: TextToTextConfig(temperature=0),
        "temperature: expected a number above 0, got 0",
    ),
    (
        lambda: ImageConfig(levels=1),
        "levels: expected 2 to 256, got 1",
    ),
    (
        lambda: ImageConfig().build(ImageConfig().tokenizer(TokenizerConfig(), [])),
        "height, width: not known before the training images are; call resolve(rows)",
    ),
    (
        lambda: SuperResolutionConfig(factor=1),
        "factor: expected 2 or more, got 1",
    ),
    (
        lambda: ImageClassificationConfig(batch_tokens=100),
        "batch_tokens: a batch is counted in images here; set batch_size",
    ),
    (
        lambda: AgentConfig(rows=3, steps=8, segment=5),
        "segment: 3 rows of 8 steps do not cut into segments of 5 and those into 4 minibatches; "
        "change one of them",
    ),
    (
        lambda: AgentConfig(rows=3, steps=8, minibatches=2),
        "segment: 3 rows of 8 steps do not cut into segments of 8 and those into 2 minibatches; "
        "change one of them",
    ),
    (
        lambda: AgentConfig(batch_tokens=128),
        "batch_tokens: an agent reads no tokens; set rows, steps and minibatches",
    ),
    (
        lambda: AgentConfig(discount=1.5),
        "discount: expected a number from 0 to 1, got 1.5",
    ),
    (
        lambda: AgentConfig(clip=-0.1),
        "clip: expected 0 or more, got -0.1",
    ),
    (
        lambda: AgentConfig(rows=0),
        "rows: expected 1 or more, got 0",
    ),
    # Rows of tasks.
    (
        lambda: SentenceOrderConfig().build(bytes_tokenizer()).rows.prepare([{"text": "one alone."}]),
        "text: no document has two sentences; they end in . ! ? or an empty line",
    ),
    (
        lambda: NextSentenceConfig().build(bytes_tokenizer()).rows.prepare([{"text": "One. Two."}]),
        "documents: expected two or more with text in them, got 1; a plain text is one document "
        "unless data.format says what ends one (paragraphs, articles, lines)",
    ),
    (
        lambda: ClassificationConfig(labels=("neg", "pos")).build(bytes_tokenizer()).rows.prepare([UNKNOWN]),
        "label: 'meh' was not seen in training, which had 'neg', 'pos'; correct its rows or leave them out",
    ),
    (
        lambda: TaggingConfig(labels=("B-LOC", "O")).build(bytes_tokenizer()).rows.prepare([UNKNOWN_TAG]),
        "label: 'B-ORG' was not seen in training, which had 'B-LOC', 'O'; correct its rows or leave them out",
    ),
    (
        lambda: TaggingConfig(labels=("B-LOC", "O")).build(bytes_tokenizer()).rows.prepare([UNTAGGED]),
        "tags: expected one for each of 2 words, got 1",
    ),
    (
        lambda: ImageConfig(height=4, width=3).build(bytes_tokenizer()).rows.prepare([WIDE]),
        "image: expected 4 x 3 pixels, as the first training image has, got 3 x 4 and 12 bytes; "
        "bring the images to one size with data.image_size, and to grey or colours with "
        "data.image_mode (grey, rgb)",
    ),
    (
        lambda: ImageClassificationConfig().resolve([{**WIDE, "label": "left"}]),
        "labels: every training image has the same one, 'left'; two or more are needed; put "
        "images of another label in a folder next to it, or train a model of pixels with "
        "--task.kind image",
    ),
    (
        lambda: ImageClassificationConfig().resolve(iter([WIDE])),
        "data.streaming: images are held in memory; set it to false",
    ),
    # Objectives.
    (
        lambda: pairs_of(torch.zeros(1, 3, 2), torch.tensor([[1, 2, 0]])),
        "pair_ids: expected every number but 0 twice in its row",
    ),
    (
        lambda: replaced(torch.tensor([[1, 9]]), torch.tensor([[-100, 5]]), torch.tensor([4, 6])),
        "drawn: expected a token for each of 1 labels, got (2,)",
    ),
    (
        lambda: chosen_layers(4, 5),
        "layers: expected 1 to 4, as many as the teacher has, got 5",
    ),
    (
        lambda: soft_loss(torch.zeros(1, 2), torch.zeros(1, 2), 0),
        "temperature: expected a number above 0, got 0",
    ),
    (
        lambda: soft_loss(torch.zeros(1, 2), torch.zeros(1, 3)),
        "student, teacher: expected logits [items, classes] of one shape, got (1, 2) and (1, 3)",
    ),
    (
        lambda: DistillationConfig(teacher="t", soft=0, hard=0, cosine=0),
        "soft, hard, cosine: expected a weight above 0, got soft 0, hard 0, cosine 0",
    ),
    (
        lambda: DistillationConfig(teacher="t", soft=-1),
        "soft: expected 0 or more, got -1",
    ),
    # Optimizers and schedules.
    (
        lambda: SGD(lr=-1.0),
        "lr: expected a number above 0, got -1.0",
    ),
    (
        lambda: Adam().build(nn.LayerNorm(3).requires_grad_(False)),
        "model: no parameter requires gradients, so there is nothing to train",
    ),
    (
        lambda: OptimizerConfig.from_dict("adamm"),
        "unknown kind of OptimizerConfig 'adamm': did you mean 'adam' or 'adamw'?; expected a "
        "kind ('adafactor'), one with options ('adafactor(name=value)'), a mapping ({kind: "
        "adafactor, name: value}) or a OptimizerConfig",
    ),
    (
        lambda: MuonConfig(adam_lr=0.0),
        "adam_lr: expected a number above 0, got 0.0",
    ),
    (
        lambda: Cosine(warmup=-1),
        "warmup: expected 0 or more, got -1",
    ),
    (
        lambda: Linear(floor=1.5),
        "floor: expected a number from 0 to 1, got 1.5",
    ),
    (
        lambda: Noam(hidden_size=0),
        "hidden_size: expected 1 or more, got 0",
    ),
    (
        lambda: ScheduleConfig.from_dict("inverse-square"),
        "unknown kind of ScheduleConfig 'inverse-square': did you mean 'inverse-sqrt' or "
        "'linear'?; expected a kind ('constant'), one with options ('constant(name=value)'), a "
        "mapping ({kind: constant, name: value}) or a ScheduleConfig",
    ),
    # Processes.
    (
        lambda: ParallelConfig(shard=2, tensor=2).sizes(6),
        "parallel: shard 2 x tensor 2 needs a multiple of 4 processes, got 6; launch as many, or "
        "make the product a divisor of their number",
    ),
    (
        lambda: ParallelConfig(data=4).sizes(2),
        "parallel: data 4 x 1 is 4 processes, got 2; launch 4 (torchrun --nproc-per-node), or "
        "leave data out: it is then the rest",
    ),
    (
        lambda: ParallelConfig(data=1, shard=2).sizes(4),
        "parallel: data 1 x shard 2 is 2 processes, got 4; launch 2 (torchrun --nproc-per-node), "
        "or leave data out: it is then the rest",
    ),
    (
        lambda: ParallelConfig(shard=0),
        "shard: expected 1 or more, got 0",
    ),
    (
        lambda: ParallelConfig(stages=2),
        "stages: expected 1, or more in a pipeline with the schedule '1f1b', got 2",
    ),
    (
        lambda: ParallelConfig(pipeline=2, context=2),
        "pipeline: not together with context yet, got pipeline 2 x context 2; use it with data, "
        "shard and tensor",
    ),
    (
        lambda: ParallelConfig(pipeline=4).check_accumulated(2),
        "accumulate: the schedule '1f1b' needs as many microbatches as stages, 4, got 2; raise "
        "accumulate, or use 'gpipe'",
    ),
    (
        lambda: ParallelConfig(pipeline=2, stages=2).check_accumulated(5),
        "accumulate: 2 processes of 2 stages run microbatches in 2 equal rounds, got 5; use a multiple of 2",
    ),
    # Recipes.
    (
        lambda: ModelChoice.from_dict("decoder-tny").config(),
        "unknown model 'decoder-tny': did you mean 'decoder-tiny' or 'encoder-tiny' or 'decoder-small'?",
    ),
    (
        lambda: ModelChoice.from_dict({"preset": "decoder-tiny", "hidden_sise": 3}).config(),
        "unknown option of ModelConfig 'hidden_sise': did you mean 'hidden_size' or 'head_size' "
        "or 'num_hidden_layers'?",
    ),
    (
        lambda: ModelChoice.from_dict({"preset": "decoder-tiny", "hidden_size": "big"}).config(),
        "hidden_size: expected int, got 'big'",
    ),
    (
        lambda: ModelChoice.from_dict({"vocab_size": 7}).config(),
        "encoder, decoder: expected at least one of them",
    ),
    (
        lambda: ModelChoice.from_dict(7).config(),
        "model: expected the name of a preset or a mapping, got 7",
    ),
    (
        lambda: ModelChoice.from_dict({"preset": 7}).config(),
        "model.preset: expected the name of a preset, got 7",
    ),
    (
        lambda: Recipe(seed=-1),
        "seed: expected 0 or more, got -1",
    ),
    (
        lambda: with_data(3, "."),
        "data: expected a mapping with a path, got 3",
    ),
    (
        lambda: with_data({"path": ["a.txt"]}, "x.txt"),
        "data.path: expected one source, got ['a.txt']; for several files a pattern, 'a/*.txt'",
    ),
    (
        lambda: absolute({"path": ["a.txt"]}),
        "data.path: expected one source, got ['a.txt']; for several files a pattern, 'a/*.txt'",
    ),
    # Recordings.
    (
        lambda: Recording(environment="CartPole-v1", out="a-v0", policies=("scritped",)),
        "unknown policy 'scritped': did you mean 'scripted'?",
    ),
    (
        lambda: Recording(environment="CartPole-v1", out="a-v0", policies=()),
        "policies: expected some of random, scripted, half-trained, got none",
    ),
    (
        lambda: Recording(environment="CartPole-v1", out="a-v0", episodes=0),
        "episodes: expected 1 or more, got 0",
    ),
    (
        lambda: Recording(environment="CartPole-v1", out="a-v0", noise=1.5),
        "noise: expected a share from 0 to 1, got 1.5",
    ),
    (
        lambda: Recording(environment="CartPole-v1", out="a-v0", max_steps=0),
        "max_steps: expected 1 or more, got 0",
    ),
]


@pytest.mark.parametrize(("call", "message"), MESSAGES, ids=[message[:50] for _, message in MESSAGES])
def test_a_message_names_the_argument_the_value_and_the_expected_value(
    call: Callable[[], object], message: str
):
    with pytest.raises(InputError) as caught:
        call()
    assert str(caught.value) == message
