"""Running a stack of a model, its encoder or its decoder, from token ids to the stack's output."""

import contextlib
import dataclasses
from collections.abc import Callable

from torch import Tensor, nn

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns import Causal, Full, SourceSpans
from polyformer.attention.patterns.base import contains
from polyformer.attention.positions import with_relations
from polyformer.core.errors import InputError
from polyformer.core.ops.int8 import Int8Embedding
from polyformer.core.ops.layers import AuxiliaryLosses, collect_auxiliary_losses
from polyformer.core.ops.softmax import recorded
from polyformer.core.sequence.context import Context, SequenceShard
from polyformer.core.sequence.context_parallel import (
    GROUPS_IN_USE,
    ContextParallel,
    current_context_parallel,
    shard_sequence,
    shard_source,
)
from polyformer.core.sequence.tokens import NO_TOKENS, ModelInputs, Tokens
from polyformer.models.architectures.arguments import (
    NO_EXTRA_OUTPUTS,
    OutputOptions,
    check_ids,
    check_inputs,
    check_source_spans,
    check_state,
    check_vocabulary,
)
from polyformer.models.architectures.context_parallel import check_context_parallel, choose_shard
from polyformer.models.architectures.unpadding import unpadding
from polyformer.models.config import ModelConfig
from polyformer.models.outputs import ModelState
from polyformer.nn.depth import Halting
from polyformer.nn.heads import Head, LastLayer
from polyformer.nn.stack import AdaptiveEmbedding, Embedding, LayerState, Source, Stack, StackConfig
from polyformer.nn.stack.rolling import all_columns

DENSE = None, Full(), Causal()
"""The patterns without a limit besides causality."""


@dataclasses.dataclass(eq=False)
class StackOutput:
    """The output of an encoder or a decoder."""

    hidden: Tensor  # [B, T, E]
    tokens: Tokens  # all tokens so far
    layer_states: tuple[LayerState, ...] | None  # for the next call
    hidden_states: tuple[Tensor, ...] | None  # these and the next if requested
    attentions: list[Tensor]
    last_layer: LastLayer | None  # for heads that run the last layer again
    auxiliary_losses: AuxiliaryLosses  # terms that parts of the stack add to the training loss
    halting: Halting | None = None  # the number of layers of each token, if it varies
    shard: SequenceShard | None = None  # this rank's tokens, to which all fields except `tokens` refer

    @property
    def output_tokens(self) -> Tokens:
        """Return the tokens of `hidden`."""
        return self.tokens if self.shard is None else self.tokens.local_part(self.shard)

    def source_state(
        self, layers: tuple[LayerState, ...], inputs: ModelInputs, owner: tuple[str, ...]
    ) -> ModelState:
        """Return the state of a decoder that has read this output of the encoder and no token of the target.

        layers: the initial states of the decoder's layers. inputs: of the source. owner: of the decoder.
        """
        tokens, spans = self.tokens, inputs.source_spans
        check_source_spans(spans, self.hidden.shape[0])
        return ModelState(
            NO_TOKENS,
            layers,
            self.hidden,
            tokens.valid,
            tokens.length,
            self.shard,
            tokens.pos,
            spans,
            inputs.text_ids,
            owner,
        )

    def next_state(self, stack: Stack, state: ModelState) -> ModelState:
        """Return the state after this output of a decoder's stack, which continued from `state`."""
        layers, depth = self.layer_states, stack.depth
        assert layers is not None
        # Layer states have the projected source, so its hidden states are kept only for a depth policy.
        source = state.source if depth is not None and depth.reads_source else None
        return state.after(stack.remembered_tokens(self.tokens, layers), layers, source)

    @property
    def slots(self) -> Tensor | None:
        """Return the indices of these tokens in the sequence, [T]; None if they are all tokens."""
        return None if self.shard is None else self.shard.slots(self.hidden.device)


@dataclasses.dataclass(eq=False)
class StackRunner:
    """References to the modules of an encoder or a decoder, and the code that runs them.

    The model creates a new `StackRunner` for each call and registers the modules itself. Their tensors thus
    keep their names in files (`encoder.layers.0...`, `encoder_embedding...`, `tokens`), and a module that a
    caller has replaced on the model, such as a resized token table, is used.
    """

    name: str  # "encoder" or "decoder"
    config: ModelConfig
    tokens: nn.Embedding | Int8Embedding | AdaptiveEmbedding
    embedding: Embedding
    stack: Stack
    head: Head
    predict: Callable[[Tensor], Tensor] | None = None  # predictions from hidden states, for early exits

    def run(
        self,
        inputs: ModelInputs,
        options: OutputOptions,
        state: ModelState | None = None,
        cached: bool = True,
        unpads: bool = False,
    ) -> StackOutput:
        """Run the stack on `inputs`, after the tokens in `state`.

        cached: whether the layers continue from their states in `state`. unpads: whether padding may be left
        out of the computation; it is left out if this is faster and changes no result.
        """
        inputs = inputs.with_all_rows()
        self._check(inputs, state, cached)
        if GROUPS_IN_USE and (over := current_context_parallel()) is not None:
            return self._compute_share(inputs, options, over, state, cached)
        plain = state is None and not options.output_attentions and not self.config.head.reruns_last_layer
        # Rows without padding are packed as documents of a single row, for attention without a pattern.
        masked = inputs.attention_mask is not None
        padding = unpadding(inputs) if masked and plain and unpads and self._is_unrestricted() else None
        if padding is None:
            return self._compute(inputs, options, state, cached)
        output = self._compute(padding.pack_inputs(inputs), options)
        layers = output.hidden_states
        return dataclasses.replace(
            output,
            hidden=padding.unpack(output.hidden),
            tokens=NO_TOKENS.extended(inputs),
            hidden_states=None if layers is None else tuple(padding.unpack(layer) for layer in layers),
        )

    def following(self, inputs: ModelInputs, state: ModelState) -> tuple[Tensor, ModelState]:
        """Return the hidden states [B, T, E] of tokens that the model itself has chosen, and the next state.

        The tokens follow `state`, and are not checked.
        """
        output = self._compute(inputs, NO_EXTRA_OUTPUTS, state)
        return output.hidden, output.next_state(self.stack, state)

    def _check(self, inputs: ModelInputs, state: ModelState | None, cached: bool) -> None:
        """Raise `InputError` for invalid inputs, with the names that the inputs have in `forward`."""
        prefix, ids = self._prefix, inputs.input_ids
        check_ids(f"{prefix}input_ids", ids)
        assert ids is not None
        if GROUPS_IN_USE or not self._lookup_checks(ids):
            check_vocabulary(f"{prefix}input_ids", ids, self.config.vocab_size)
        if state is not None and cached:
            check_state(state, ModelState, self.stack, ids.shape[0])
        # RoBERTa's padding has the row before position 0.
        rows_before = getattr(self.stack.position, "offset", 0)
        check_inputs(inputs, state.tokens.seen if state else 0, prefix, rows_before)

    @property
    def _prefix(self) -> str:
        """Return the beginning of the names of arguments: the target of an encoder-decoder has its own."""
        return "decoder_" if self.name == "decoder" and self.config.encoder else ""

    def _lookup_checks(self, ids: Tensor) -> bool:
        """Return whether the token table refuses ids outside the vocabulary, as torch's does on a CPU."""
        table, rows = self.tokens, self.config.vocab_size
        whole = (
            type(table) is nn.Embedding and table.num_embeddings == rows and not self.stack.layer_range.start
        )
        return whole and ids.is_cpu

    def _is_unrestricted(self) -> bool:
        """Return whether in all layers every token attends to its document (or all before it)."""
        mechanism = getattr(self.config, self.name).attention.mechanism
        dense = isinstance(mechanism, SoftmaxConfig) and mechanism.pattern in DENSE
        return dense and self.stack.depth is None

    def check_context_parallel(self) -> None:
        """Raise `InputError` if a part of this stack does not support context parallelism."""
        config: StackConfig = getattr(self.config, self.name)
        if self.config.embedding.token_dropout is not None:
            raise InputError(
                "embedding.token_dropout: it counts the masks of whole texts, of which a process reads a "
                "part; set it to null, or leave parallel.context at 1"
            )
        check_context_parallel(config, self.stack, self.head, self.config.head.kind)

    def _compute_share(
        self,
        inputs: ModelInputs,
        options: OutputOptions,
        over: ContextParallel,
        state: ModelState | None,
        cached: bool,
    ) -> StackOutput:
        """Run the stack on this rank's shard of the tokens of `inputs` and of a source in `state`."""
        self.check_context_parallel()
        if state is not None and (state.source_shard is None or cached):
            raise InputError(
                "state, use_cache: context parallelism reads the whole sequence in one call; leave them out"
            )
        return self._compute(inputs, options, state, cached, over)

    def _compute(
        self,
        inputs: ModelInputs,
        options: OutputOptions,
        state: ModelState | None = None,
        cached: bool = True,
        over: ContextParallel | None = None,
    ) -> StackOutput:
        """Run the stack on all tokens of `inputs`, including padding, or on this process's share of them."""
        ids = inputs.input_ids
        assert ids is not None
        new, stack = ids.shape[1], self.stack
        if stack.reads_marks or inputs.global_attention_mask is not None:
            inputs = self._with_global_tokens(inputs, ids)
        tokens = (state.tokens if state else NO_TOKENS).extended(inputs)
        # Positions continue after the tokens in `state`, so only the new ones are needed here.
        pos = tokens.last(new, ids.device)
        context = tokens.context(new, self.name == "decoder", ids.device)
        if inputs.relation_ids is not None:
            context = with_relations(context, inputs.relation_ids, len(ids), stack.position)
        target = context
        shard = None if over is None else choose_shard(over, context, getattr(self.config, self.name))
        if shard is not None:
            context, inputs = shard_sequence(context, shard, ids.device), inputs.local_part(shard)
            ids, pos = shard.take(ids), shard.take(pos)
        source = None
        if state is not None and self.name == "decoder" and self.config.encoder is not None:
            source = self._source(state, target, shard)
        layer_states = state.layers if state is not None and cached else None
        if layer_states is not None:
            layer_states = stack.without_unread(layer_states, context, tokens.seen - new)
        x = self._embed(ids, pos, inputs)
        again = self.config.head.reruns_last_layer
        collect: list[Tensor] | None = [] if options.output_hidden_states or again else None
        halting = stack.start_halting(x, pos, context, source, self.predict)
        features = {} if halting is None else {"halting": halting}
        recording = recorded() if options.output_attentions else contextlib.nullcontext([])
        with recording as attentions, collect_auxiliary_losses() as auxiliary_losses:
            hidden, layer_states = stack.run(x, pos, context, source, layer_states, collect, **features)
        if attentions and layer_states is not None and stack.memory is None:
            attentions = all_columns(attentions, layer_states, tokens.seen, source is not None)
        last_layer = None
        if collect is not None and again:
            # The last two hidden states are the last layer's input and its output.
            read = collect[-2]
            last_layer = LastLayer(read, pos, lambda x: stack.rerun_last_layer(x, read, context))
        hidden_states = tuple(collect) if collect is not None and options.output_hidden_states else None
        return StackOutput(
            hidden,
            tokens,
            layer_states,
            hidden_states,
            attentions,
            last_layer,
            auxiliary_losses,
            halting,
            shard,
        )

    def _source(self, state: ModelState, target: Context, shard: SequenceShard | None) -> Source:
        """Return the source in `state` for the decoder's new tokens.

        target: the context of these tokens within their own sequence, on all processes.
        """
        self._check_spans(state.source_spans)
        read = Context(target.q_len, state.source_length, kv_valid=state.source_valid)
        if self.stack.aligns_source:
            read = read.between_positions(target, state.source_pos, state.source_spans)
        if shard is not None and state.source_shard is not None:
            read = shard_source(read, shard, state.source_shard)
        return Source(state.source, read)

    def _check_spans(self, spans: Tensor | None) -> None:
        """Raise `InputError` if spans of the source are missing, or no pattern reads them."""
        pattern = self.config.cross_attention
        if contains(pattern, SourceSpans) == (spans is not None):
            return
        if spans is None:
            raise InputError(
                "source_spans: the pattern SourceSpans() of cross_attention reads them; give the first and "
                "the last source position of each target position, [batch, target length, 2]"
            )
        text = None if pattern is None else pattern.to_text()
        raise InputError(f"source_spans: cross_attention {text} does not read them; set it to SourceSpans()")

    def _embed(self, ids: Tensor, pos: Tensor, inputs: ModelInputs) -> Tensor:
        """Return the input of the first layer that runs; in later pipeline stages `inputs_embeds`."""
        try:
            vectors = self.tokens(ids) if inputs.inputs_embeds is None else inputs.inputs_embeds
        except IndexError:  # of a lookup on a CPU
            check_vocabulary(f"{self._prefix}input_ids", ids, self.config.vocab_size)
            raise
        # A later pipeline stage gets hidden states, not token vectors.
        if self.stack.layer_range.start:
            return vectors
        return self.embedding(vectors, self.stack.position, pos, inputs)

    def _with_global_tokens(self, inputs: ModelInputs, ids: Tensor) -> ModelInputs:
        """Return the inputs with the global tokens that the head requires, if the caller names none and a
        pattern of the stack reads them; raises `InputError` if the caller names some and no pattern reads
        them."""
        if inputs.global_attention_mask is not None:
            if not self.stack.reads_marks:
                raise InputError(
                    f"global_attention_mask: no pattern of the {self.name} reads it; "
                    "add `| Marked()` to its attention"
                )
            return inputs
        mask = inputs.attention_mask
        mask = None if mask is None else mask[:, -ids.shape[1] :]  # with a state it may cover the past too
        marks = self.config.head.global_attention_mask(ids, mask)
        if marks is None:
            return inputs
        return dataclasses.replace(inputs, global_attention_mask=marks)
