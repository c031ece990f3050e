"""The base class of all wrapped models: construction, calls and changes, and their vocabulary.

The output matrix [V, E], as transformers' tools know it, is the head itself if the head has a matrix, and
otherwise the token table of the tied head. Both are modules of the model with their own `weight`. So a tool
may find the module by identity, copy it, shard it or exclude it from adaptation; no name of a parameter
changes.
"""

import dataclasses
import inspect
import os
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from torch import Tensor, nn
from transformers import modeling_outputs as outputs
from transformers.utils.generic import ModelOutput as HubOutput

from polyformer.core.errors import InputError, quote, unknown
from polyformer.core.sequence.tokens import NO_TOKENS, ModelInputs
from polyformer.models.architectures import Transformer
from polyformer.models.architectures.arguments import OutputOptions
from polyformer.models.architectures.model_card import CARD, write_card
from polyformer.models.outputs import ModelOutput, ModelState
from polyformer.models.transformers.cache import PolyformerCache, as_polyformer_cache, supports_kv_cache
from polyformer.models.transformers.inputs import (
    OTHER_TEXT_INPUTS,
    OUTPUT_ARGUMENTS,
    TEXT,
    Arguments,
    accepts,
    accepts_text,
    resolve_text_inputs,
)
from polyformer.models.transformers.saved_folder import (
    TRAJECTORY,
    PolyformerConfig,
    auto_map,
    card_of,
    push,
    shared_weights_loaded,
    write_module,
)
from polyformer.nn.heads.adaptive import AdaptiveSoftmax
from polyformer.nn.heads.vocabulary import VocabularyHead, VocabularyOutput
from polyformer.nn.stack import AdaptiveEmbedding


def output_matrix(model: nn.Module) -> nn.Module | None:
    """Return the module with the matrix as `weight`; None for a head of another kind or in clusters."""
    head = _vocabulary_head(model)
    if head is None:
        return None
    return _table(model)[1] if head.weight is None else head


def replace_output_matrix(model: nn.Module, value: Any) -> None:
    """Use the `weight` of `value` as the matrix, and its `bias`, if any, as the head's bias.

    A tied head stays tied: its table is replaced for all modules that use it.
    """
    head: Any = _vocabulary_head(model)
    if head is None:
        raise InputError("set_output_embeddings: the head of this model has no matrix over the vocabulary")
    # Tools also set the module that they have got.
    if value is output_matrix(model):
        return
    weight: Any = getattr(value, "weight", None)
    bias: Any = getattr(value, "bias", None)
    _check(model, weight, bias, head.bias, isinstance(value, nn.Embedding))
    if head.weight is None:
        name, _ = _table(model)
        if not isinstance(value, nn.Embedding):
            table = nn.Embedding(*weight.shape, device="meta")
            table.weight = weight
            value = table
        setattr(model, name, value)
    else:
        head.weight = weight
    if bias is not None:
        head.bias = bias


def _check(model: nn.Module, weight: Any, bias: Any, old: Any, is_table: bool) -> None:
    """Raise `InputError` if a matrix or a bias does not fit the model."""
    matrix: Any = output_matrix(model)
    tokens: Any = model.tokens
    expected = (len(tokens.weight), matrix.weight.shape[1])
    if not isinstance(weight, nn.Parameter) or weight.shape != expected:
        shape = tuple(weight.shape) if isinstance(weight, torch.Tensor) else type(weight).__name__
        raise InputError(
            f"set_output_embeddings: expected a module with a parameter `weight` of the shape {expected}, "
            f"got {quote(shape)}; for another number of tokens use resize_token_embeddings"
        )
    if not is_table and (bias is None) == isinstance(old, nn.Parameter):
        got, has = ("none", "a") if bias is None else ("one", "no")
        raise InputError(f"set_output_embeddings: the head has {has} bias, the module {got}")


def _vocabulary_head(model: nn.Module) -> Any:
    """Return the head over the vocabulary, the token head of two; a tool may have wrapped it."""
    if not isinstance(model, Transformer):
        return None
    head: Any = model.head
    head = getattr(head, "tokens", head)
    return head if isinstance(getattr(head, "output", None), VocabularyOutput) else None


def _table(model: Any) -> tuple[str, nn.Module]:
    """Return the name and the module of the token table that a tied head reads."""
    name = "tokens" if model.decoder_tokens is None else "decoder_tokens"
    return name, getattr(model, name)


def check_resizable(model: nn.Module) -> None:
    """Raise `InputError` for vocabularies in clusters, in which another size would change the clusters."""
    if any(isinstance(module, AdaptiveEmbedding | AdaptiveSoftmax) for module in model.modules()):
        raise InputError(
            "resize_token_embeddings: adaptive embeddings and softmax have clusters of fixed sizes; create "
            "a new model with the new vocabulary"
        )


def resize(model: nn.Module, size: int) -> None:
    """Fit `model` to the `size` that its token table already has.

    New rows of matrices are the mean of the old rows, new biases are 0.
    """
    if not isinstance(model, Transformer):
        raise InputError(f"resize_token_embeddings: {type(model).__name__} has no tokens")
    for module in model.head.modules():
        if isinstance(module, VocabularyHead):
            _resize_head(module, size)
    if isinstance(model.decoder_tokens, nn.Embedding):
        table = model.decoder_tokens
        rows = _rows(table.weight, size, fill=None)
        model.decoder_tokens = nn.Embedding.from_pretrained(rows, freeze=not table.weight.requires_grad)
    assert isinstance(model.tokens, nn.Embedding), "int8 is not wrapped"
    model.tokens.num_embeddings = size
    model.config = dataclasses.replace(model.config, vocab_size=size)


def _resize_head(head: VocabularyHead, size: int) -> None:
    if isinstance(head.weight, nn.Parameter):
        head.weight = nn.Parameter(_rows(head.weight, size, fill=None), head.weight.requires_grad)
    bias = head.bias
    if isinstance(bias, nn.Parameter):
        head.bias = nn.Parameter(_rows(bias, size, fill=0.0), bias.requires_grad)
    elif bias is not None:
        head.bias = _rows(bias, size, fill=0.0)


def _rows(old: Tensor, size: int, fill: float | None) -> Tensor:
    """Return the first `size` rows of `old`; missing rows are `fill`, or the mean of the old rows."""
    with torch.no_grad():
        more = max(size - len(old), 0)
        shape = (more, *old.shape[1:])
        # The mean row gives new tokens an average probability.
        new = old.mean(0).expand(shape) if fill is None else old.new_full(shape, fill)
        return torch.cat([old[:size], new]).clone()


# Arguments that `save_pretrained` accepts; transformers ignores all other names.
SAVE_ARGUMENTS = {
    *inspect.signature(transformers.PreTrainedModel.save_pretrained).parameters,
    *inspect.signature(transformers.PreTrainedModel.push_to_hub).parameters,
    "safe_serialization",
    "save_function",
} - {"self", "kwargs", "save_directory"}

SHARED_ARGUMENTS = {"max_shard_size", "token"}  # of saving and of an upload
# Arguments that `save_pretrained` passes to an upload.
UPLOAD_ARGUMENTS = {*inspect.signature(push).parameters, "push_to_hub"} - {"model", "card", *SHARED_ARGUMENTS}

OUTPUT_OPTIONS = ("output_attentions", "output_hidden_states")


class PolyformerModel(transformers.PreTrainedModel):
    """The base class of all wrappers, and the wrapper of models without a task."""

    config_class = PolyformerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True  # the Trainer's `num_items_in_batch`
    _supports_sdpa = True
    _no_split_modules: ClassVar[list[str]] = ["Layer"]
    gradient_checkpointing = False
    model: Any  # a `Transformer`, except for trajectories
    result: ClassVar[Any] = outputs.BaseModelOutputWithPoolingAndCrossAttentions
    both_result: ClassVar[Any] = outputs.Seq2SeqModelOutput

    for_trajectories: ClassVar[Any] = None  # the result of `AutoModel` for a Decision Transformer

    def __new__(cls, config: PolyformerConfig | None = None, *options: Any, **more: Any) -> Any:
        """Return an instance of the class for `config`, which is missing in copying and unpickling."""
        tree = config.polyformer if cls is PolyformerModel and config is not None else None
        # AutoModel knows a single class for the model_type.
        kind: Any = cls.for_trajectories if TRAJECTORY in (tree or {}) else cls
        return super().__new__(kind)

    def __init__(self, config: PolyformerConfig):
        super().__init__(config)
        self.model = self._build(config)
        self.post_init()

    def _build(self, config: PolyformerConfig) -> nn.Module:
        return Transformer(config.transformer())

    def _init_weights(self, module: nn.Module) -> None:
        """Do nothing: `Transformer` has initialized its weights."""

    @classmethod
    def can_generate(cls) -> bool:
        """Return False: only decoders with a language-model head generate (`GenerativeWrapper`)."""
        return False

    def gradient_checkpointing_enable(self, *options: Any, **more: Any) -> None:
        """Enable our activation checkpointing, which has no options."""
        self._recompute(True)

    def gradient_checkpointing_disable(self) -> None:
        """Disable activation checkpointing."""
        self._recompute(False)

    activation_checkpointing_enable = gradient_checkpointing_enable
    activation_checkpointing_disable = gradient_checkpointing_disable

    def _recompute(self, wanted: bool) -> None:
        self.gradient_checkpointing = wanted
        for stack in (getattr(self.model, "encoder", None), self.model.decoder):
            if stack is not None:
                stack.recompute = wanted

    def get_input_embeddings(self) -> nn.Module:
        """Return the token table [V, E]; for an encoder-decoder the source table."""
        return self.model.tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the token table; a tied head uses the new table."""
        self.model.tokens = value

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the module with the matrix [V, E] of the logits: the head, or a tied head's token table."""
        return output_matrix(self.model)

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Use another module's matrix, and bias; a tied head stays tied, so its token table is replaced."""
        replace_output_matrix(self.model, new_embeddings)

    def _get_resized_lm_head(self, old_lm_head: nn.Module, *sizes: Any, **options: Any) -> nn.Module:
        """Return the head unchanged: `resize` has fitted it."""
        return old_lm_head

    def _resize_token_embeddings(
        self, new_num_tokens: int | None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        check_resizable(self.model)
        table: Any = super()._resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        resize(self.model, len(table.weight))
        self.config.polyformer = self.model.config.to_dict()
        return table

    def _run(self, arguments: Arguments) -> Any:
        """Return the result of transformers' models, with the same arguments (`transformers.inputs`)."""
        as_dict = arguments.pop("return_dict", self.config.return_dict)
        items = arguments.pop("num_items_in_batch", None)
        # An argument takes precedence over the configuration.
        for name in OUTPUT_OPTIONS:
            arguments[name] = bool(arguments.get(name, getattr(self.config, name, False)))
        resolve_text_inputs(arguments, self.model, self.config.pad_token_id)
        source = arguments.pop("encoder_outputs", None)
        with shared_weights_loaded(self.model):
            cache = self._cache(arguments)
            source = self._resolve_source(arguments, cache, source)
            result, predictions = self._call(arguments)
            fields = {**self._fields(result), **predictions}
        if items is not None and result.loss is not None:  # the batch consists of several microbatches
            # The Trainer sums losses over microbatches, so each must be a part of the mean.
            share = self._num_labelled(arguments).to(result.loss.device) / items
            fields["loss"] = result.loss * share
        if cache is not None and result.state is not None:
            fields["past_key_values"] = cache.update_state(result.state)
        if source is not None:
            fields["encoder_last_hidden_state"] = source[0]
        return self._as_result(fields, as_dict)

    forward: Any = accepts_text(source=True)(_run)

    def _cache(self, arguments: Arguments) -> PolyformerCache | None:
        """Return the cache from which the call continues, if any, and put its state into `arguments`."""
        past, wanted = arguments.pop("past_key_values", None), arguments.pop("use_cache", None)
        if self.model.decoder is None:
            if past is not None or (wanted and "use_cache" in arguments):
                raise InputError("past_key_values: an encoder has no cache; leave it out")
            return None
        if past is None:
            # As in transformers, a cache is also returned unasked, but not in training.
            quietly = self.config.use_cache and not self.training and "labels" not in arguments
            if not (wanted or (wanted is None and quietly and supports_kv_cache(self.model))):
                return None
        cache = PolyformerCache() if past is None else as_polyformer_cache(past, self.model, arguments)
        arguments["use_cache"] = True
        if cache.state is None and self.model.encoder is None:
            cache.state = self.model.new_state(cache.reserve)
        arguments["state"] = cache.state
        return cache

    def _resolve_source(self, arguments: Arguments, cache: PolyformerCache | None, source: Any) -> Any:
        """Return the output of an encoder-decoder's encoder if it was computed before this call."""
        if not self.config.is_encoder_decoder:
            if source is not None:
                raise InputError("encoder_outputs: this model has no cross-attention; leave them out")
            return None
        past = None if cache is None else cache.state
        # The cache contains the projected source.
        if past is not None and past.source_length:
            for name in (*TEXT, *OTHER_TEXT_INPUTS):
                arguments.pop(name, None)
            return source
        if source is None and past is None:
            return None
        if source is None:  # a prefix for the decoder, and a source that is not encoded yet
            source = self.get_encoder()(
                **{name: arguments[name] for name in (*TEXT, *OTHER_TEXT_INPUTS) if name in arguments}
            )
        hidden, mask = source[0], arguments.get("attention_mask")
        layers = () if past is None else past.layers
        if cache is not None and past is None:
            layers = self.model.decoder.new_states(cache.reserve)
        valid = None if mask is None or bool(mask.all()) else mask.bool()
        tokens = NO_TOKENS if past is None else past.tokens
        arguments["state"] = ModelState(tokens, layers, hidden, valid, hidden.shape[1])
        for name in (*TEXT, *OTHER_TEXT_INPUTS):
            arguments.pop(name, None)
        return source

    def _fields(self, result: ModelOutput) -> Arguments:
        """Return the outputs of transformers, by the names that some class of transformers has for them."""
        both = self.config.is_encoder_decoder
        side = "decoder_" if both else ""
        return {
            "loss": result.loss,
            "last_hidden_state": result.last_hidden_state,
            f"{side}hidden_states": result.hidden_states,
            f"{side}attentions": result.attentions,
            "cross_attentions": result.cross_attentions,
            "encoder_last_hidden_state": result.encoder_last_hidden_state,
            "encoder_hidden_states": result.encoder_hidden_states,
            "encoder_attentions": result.encoder_attentions,
        }

    def _call(self, arguments: Arguments) -> tuple[ModelOutput, Arguments]:
        """Return the output of our model, and its predictions by the names of transformers."""
        result = self.model(**arguments)
        head = self.model.config.head
        pools = (
            self.model.config.origin is None or head.hidden
        )  # transformers' models without a pooler have no such output
        return result, {"pooler_output": result.logits} if pools else {}

    def _logits(self, arguments: Arguments) -> tuple[ModelOutput, Arguments]:
        """Return the same as `_call`, for models with logits, if required for some tokens only."""
        kept = arguments.pop("logits_to_keep", 0)
        result = self.model(**arguments)
        if isinstance(kept, int) and not kept:
            return result, {"logits": result.logits}
        places = slice(-kept, None) if isinstance(kept, int) else kept
        return result, {"logits": self.model.logits_at(result, places)}

    def _num_labelled(self, arguments: Arguments) -> Tensor:
        """Return the number of items over which the mean loss is computed."""
        return (arguments["labels"] != -100).sum()

    def _as_result(self, fields: Arguments, as_dict: bool | None) -> Any:
        kind = self._result_class()
        known = kind.__dataclass_fields__
        result: HubOutput = kind(**{name: value for name, value in fields.items() if name in known})
        return result if as_dict is not False else result.to_tuple()

    def _result_class(self) -> Any:
        return self.both_result if self.config.is_encoder_decoder else self.result

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], *arguments: Any, **options: Any
    ) -> None:
        """Save like transformers' models, with a card (README.md) unless there is another card.

        Raises `InputError` for names that transformers would ignore, and for pickles. As in transformers,
        `save_function` does not change the written files.
        """
        for name in options:
            if name not in SAVE_ARGUMENTS:
                raise unknown("argument of save_pretrained", name, SAVE_ARGUMENTS)
        if options.pop("safe_serialization", True) is not True:
            raise InputError("safe_serialization: weights are always written as safetensors; leave it out")
        upload = {name: options.pop(name) for name in UPLOAD_ARGUMENTS & options.keys()}
        self.config.auto_map = auto_map(type(self))
        # The first positional argument is is_main_process.
        writes = arguments[0] if arguments else options.get("is_main_process", True)
        super().save_pretrained(save_directory, *arguments, **options)
        folder = Path(save_directory)
        if not writes or not folder.is_dir():
            return
        write_module(folder, self.config.auto_map)
        write_card(folder, card_of(self, folder.absolute().name, measured="state_dict" not in options))
        if upload.pop("push_to_hub", False):
            size = {name: options[name] for name in SHARED_ARGUMENTS & options.keys()}
            push(self, upload.pop("repo_id", folder.absolute().name), card=folder / CARD, **size, **upload)

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Upload like transformers' models and return the address of the commit.

        Our card is added unless the repository has a card that somebody wrote. Options: see
        `polyformer.models.transformers.saved_folder.push`.
        """
        return push(self, repo_id, **options)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Do nothing: saved files name the package's classes, and contain no copy of their source."""

    def get_encoder(self, modality: str | None = None) -> "Encoder":
        """Return the encoder of an encoder-decoder as a separate module; `modality` has no effect."""
        return Encoder(self)


class Encoder(nn.Module):
    """The encoder of an encoder-decoder as a separate module, which transformers' generation calls."""

    def __init__(self, owner: PolyformerModel):
        super().__init__()
        self.owner = [owner]  # not registered as a submodule

    @accepts(*TEXT, *OTHER_TEXT_INPUTS, *OUTPUT_ARGUMENTS, var_keyword=False)
    def forward(self, arguments: Arguments) -> Any:
        """Return a BaseModelOutput."""
        model = self.owner[0].model
        resolve_text_inputs(arguments, model, None)
        names = {field.name for field in dataclasses.fields(ModelInputs)}
        text = ModelInputs(**{name: value for name, value in arguments.items() if name in names})
        with shared_weights_loaded(model):
            ran = model.read_source(
                text.with_placeholder_ids(),
                OutputOptions(*(bool(arguments.get(name)) for name in OUTPUT_OPTIONS)),
            )
        result = outputs.BaseModelOutput(ran.hidden, ran.hidden_states, tuple(ran.attentions) or None)
        return result if arguments.get("return_dict", True) else result.to_tuple()
