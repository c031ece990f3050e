"""Tasks: training objectives with their data preparation and metrics."""

from polyformer.core.registry import import_modules
from polyformer.tasks.act import Acting, ActingConfig
from polyformer.tasks.agent import Agent, AgentConfig
from polyformer.tasks.base import HeldOut, Task, TaskConfig
from polyformer.tasks.choose import Choosing, ChoosingConfig
from polyformer.tasks.classify import (
    Classification,
    ClassificationConfig,
    PairClassification,
    PairClassificationConfig,
)
from polyformer.tasks.classify_image import ImageClassification, ImageClassificationConfig
from polyformer.tasks.cpc import ContrastiveModelling, ContrastiveModellingConfig
from polyformer.tasks.denoise import Denoising, DenoisingConfig
from polyformer.tasks.electra import Electra, ElectraConfig
from polyformer.tasks.fitting import Fitting
from polyformer.tasks.image import ImageConfig, ImageModelling
from polyformer.tasks.labels import OneLabel
from polyformer.tasks.lm import LanguageModelling, LanguageModellingConfig
from polyformer.tasks.mlm import MaskedModelling, MaskedModellingConfig
from polyformer.tasks.qa import Answering, AnsweringConfig
from polyformer.tasks.sentence_pairs import NextSentenceConfig, SentenceOrderConfig, SentencePairs
from polyformer.tasks.spans import SpanCorruption, SpanCorruptionConfig
from polyformer.tasks.summarize import Summarization, SummarizationConfig
from polyformer.tasks.tag import Tagging, TaggingConfig
from polyformer.tasks.text import TextTask, TextTaskConfig
from polyformer.tasks.text_to_text import Part, TextToText, TextToTextConfig
from polyformer.tasks.tlm import TranslationModelling, TranslationModellingConfig
from polyformer.tasks.translate import Translation, TranslationConfig
from polyformer.tasks.workers import Workers
from polyformer.tasks.writing import Writing, WritingConfig

__all__ = [
    "Acting",
    "ActingConfig",
    "Agent",
    "AgentConfig",
    "Answering",
    "AnsweringConfig",
    "Choosing",
    "ChoosingConfig",
    "Classification",
    "ClassificationConfig",
    "ContrastiveModelling",
    "ContrastiveModellingConfig",
    "Denoising",
    "DenoisingConfig",
    "Electra",
    "ElectraConfig",
    "Fitting",
    "HeldOut",
    "ImageClassification",
    "ImageClassificationConfig",
    "ImageConfig",
    "ImageModelling",
    "LanguageModelling",
    "LanguageModellingConfig",
    "MaskedModelling",
    "MaskedModellingConfig",
    "NextSentenceConfig",
    "OneLabel",
    "PairClassification",
    "PairClassificationConfig",
    "Part",
    "SentenceOrderConfig",
    "SentencePairs",
    "SpanCorruption",
    "SpanCorruptionConfig",
    "Summarization",
    "SummarizationConfig",
    "Tagging",
    "TaggingConfig",
    "Task",
    "TaskConfig",
    "TextTask",
    "TextTaskConfig",
    "TextToText",
    "TextToTextConfig",
    "Translation",
    "TranslationConfig",
    "TranslationModelling",
    "TranslationModellingConfig",
    "Workers",
    "Writing",
    "WritingConfig",
]

import_modules(__name__)
