"""Tasks: training objectives with their data preparation and metrics."""

from polyformer.core.registry import import_modules
from polyformer.training.task import Workers
from polyformer.training.tasks.act import ActionPrediction, ActionPredictionConfig
from polyformer.training.tasks.agent import Agent, AgentConfig
from polyformer.training.tasks.base import HeldOut, Task, TaskConfig, TaskWithData
from polyformer.training.tasks.classify import (
    Classification,
    ClassificationConfig,
    GroupedClassification,
    GroupedClassificationConfig,
    PairClassification,
    PairClassificationConfig,
    PairRegression,
    PairRegressionConfig,
)
from polyformer.training.tasks.classify_image import ImageClassification, ImageClassificationConfig
from polyformer.training.tasks.conversations import (
    InstructionTuning,
    InstructionTuningConfig,
    PreferenceTuning,
    PreferenceTuningConfig,
)
from polyformer.training.tasks.denoise import Denoising, DenoisingConfig, SpanCorruption, SpanCorruptionConfig
from polyformer.training.tasks.diffusion import MaskedDiffusion, MaskedDiffusionConfig
from polyformer.training.tasks.image import (
    ImageConfig,
    ImageModelling,
    SuperResolution,
    SuperResolutionConfig,
)
from polyformer.training.tasks.labels import SingleLabelTask
from polyformer.training.tasks.lm import (
    LanguageModelling,
    LanguageModellingConfig,
    PermutedModelling,
    PermutedModellingConfig,
)
from polyformer.training.tasks.masked import (
    Electra,
    ElectraConfig,
    MaskedModelling,
    MaskedModellingConfig,
    TranslationModelling,
    TranslationModellingConfig,
)
from polyformer.training.tasks.questions import (
    MultipleChoice,
    MultipleChoiceConfig,
    QuestionAnswering,
    QuestionAnsweringConfig,
)
from polyformer.training.tasks.sentences import (
    ContrastiveModelling,
    ContrastiveModellingConfig,
    NextSentenceConfig,
    SentenceOrderConfig,
    SentencePairs,
)
from polyformer.training.tasks.seq2seq import (
    SequenceToSequence,
    SequenceToSequenceConfig,
    Summarization,
    SummarizationConfig,
    Translation,
    TranslationConfig,
)
from polyformer.training.tasks.tag import ExtractConfig, Extraction, Tagging, TaggingConfig
from polyformer.training.tasks.text import TextTask, TextTaskConfig
from polyformer.training.tasks.text_to_text import MixturePart, TextToText, TextToTextConfig

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
    "InstructionTuning",
    "InstructionTuningConfig",
    "LanguageModelling",
    "LanguageModellingConfig",
    "MaskedDiffusion",
    "MaskedDiffusionConfig",
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
    "PermutedModelling",
    "PermutedModellingConfig",
    "PreferenceTuning",
    "PreferenceTuningConfig",
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
