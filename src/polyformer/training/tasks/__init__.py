"""Tasks: training objectives with their data preparation and metrics."""

from polyformer.core.registry import import_modules
from polyformer.training.tasks.act import ActionPrediction, ActionPredictionConfig
from polyformer.training.tasks.agent import Agent, AgentConfig
from polyformer.training.tasks.base import HeldOut, Task, TaskConfig, TaskWithData, Workers
from polyformer.training.tasks.choose import MultipleChoice, MultipleChoiceConfig
from polyformer.training.tasks.classify import (
    Classification,
    ClassificationConfig,
    GroupedClassification,
    GroupedClassificationConfig,
    PairClassification,
    PairClassificationConfig,
)
from polyformer.training.tasks.classify_image import ImageClassification, ImageClassificationConfig
from polyformer.training.tasks.cpc import ContrastiveModelling, ContrastiveModellingConfig
from polyformer.training.tasks.denoise import Denoising, DenoisingConfig
from polyformer.training.tasks.electra import Electra, ElectraConfig
from polyformer.training.tasks.extract import ExtractConfig, Extraction
from polyformer.training.tasks.image import ImageConfig, ImageModelling
from polyformer.training.tasks.labels import SingleLabelTask
from polyformer.training.tasks.lm import LanguageModelling, LanguageModellingConfig
from polyformer.training.tasks.mlm import MaskedModelling, MaskedModellingConfig
from polyformer.training.tasks.qa import QuestionAnswering, QuestionAnsweringConfig
from polyformer.training.tasks.regress import PairRegression, PairRegressionConfig
from polyformer.training.tasks.sentence_pairs import NextSentenceConfig, SentenceOrderConfig, SentencePairs
from polyformer.training.tasks.seq2seq import SequenceToSequence, SequenceToSequenceConfig
from polyformer.training.tasks.spans import SpanCorruption, SpanCorruptionConfig
from polyformer.training.tasks.summarize import Summarization, SummarizationConfig
from polyformer.training.tasks.super_resolution import SuperResolution, SuperResolutionConfig
from polyformer.training.tasks.tag import Tagging, TaggingConfig
from polyformer.training.tasks.text import TextTask, TextTaskConfig
from polyformer.training.tasks.text_to_text import MixturePart, TextToText, TextToTextConfig
from polyformer.training.tasks.tlm import TranslationModelling, TranslationModellingConfig
from polyformer.training.tasks.translate import Translation, TranslationConfig

__all__ = [
    "ActionPrediction",
    "ActionPredictionConfig",
    "Agent",
    "AgentConfig",
    "Classification",
    "ClassificationConfig",
    "ContrastiveModelling",
    "ContrastiveModellingConfig",
    "Denoising",
    "DenoisingConfig",
    "Electra",
    "ElectraConfig",
    "ExtractConfig",
    "Extraction",
    "GroupedClassification",
    "GroupedClassificationConfig",
    "HeldOut",
    "ImageClassification",
    "ImageClassificationConfig",
    "ImageConfig",
    "ImageModelling",
    "LanguageModelling",
    "LanguageModellingConfig",
    "MaskedModelling",
    "MaskedModellingConfig",
    "MixturePart",
    "MultipleChoice",
    "MultipleChoiceConfig",
    "NextSentenceConfig",
    "PairClassification",
    "PairClassificationConfig",
    "PairRegression",
    "PairRegressionConfig",
    "QuestionAnswering",
    "QuestionAnsweringConfig",
    "SentenceOrderConfig",
    "SentencePairs",
    "SequenceToSequence",
    "SequenceToSequenceConfig",
    "SingleLabelTask",
    "SpanCorruption",
    "SpanCorruptionConfig",
    "Summarization",
    "SummarizationConfig",
    "SuperResolution",
    "SuperResolutionConfig",
    "Tagging",
    "TaggingConfig",
    "Task",
    "TaskConfig",
    "TaskWithData",
    "TextTask",
    "TextTaskConfig",
    "TextToText",
    "TextToTextConfig",
    "Translation",
    "TranslationConfig",
    "TranslationModelling",
    "TranslationModellingConfig",
    "Workers",
]

import_modules(__name__)
