"""The model of tokens: a token table, an encoder or a decoder or both, and a head.

`Transformer(config)` is a `DraftingTransformer` if the configuration has parts that draft.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from polyformer.core.errors import InputError, quote
from polyformer.core.modules import names_wrong_types
from polyformer.core.ops.int8 import Int8Embedding, Int8Weight
from polyformer.core.ops.layers import collect_auxiliary_losses, sum_auxiliary_losses
from polyformer.core.parts import submodule
from polyformer.core.sequence.tokens import NO_TOKENS, ModelInputs
from polyformer.models.architectures import arguments
from polyformer.models.architectures.arguments import (
    NO_EXTRA_OUTPUTS,
    NO_LABELS,
    DecoderInputs,
    Labels,
    OutputOptions,
    check_same_source,
    refuse,
)
from polyformer.models.architectures.context_parallel import mean_loss_over_group
from polyformer.models.architectures.exit_loss import ExitLoss
from polyformer.models.architectures.pretrained import PretrainedMixin
from polyformer.models.architectures.stack_runner import StackOutput, StackRunner
from polyformer.models.architectures.weights import freeze_pretrained_parameters, quantize_weights
from polyformer.models.config import ModelConfig
from polyformer.models.generation import Decode, Generated, GenerationConfig, generate
from polyformer.models.generation.hub_format import from_hub
from polyformer.models.initialization import initialize
from polyformer.models.outputs import ModelOutput, ModelState
from polyformer.nn.cache import CachePolicy
from polyformer.nn.heads import Head, HeadInput
from polyformer.nn.heads.drafting import Drafting, DraftingInput
from polyformer.nn.stack import AdaptiveEmbedding, Embedding, Stack, build_stack, with_policy

# The modules that map token ids to vectors.
Table = nn.Embedding | Int8Embedding | AdaptiveEmbedding


class Transformer(PretrainedMixin):
    """A Transformer of tokens; see `forward`. `recompute` on its stacks enables activation checkpointing."""

    config_type = ModelConfig
    config: ModelConfig
    unpads = True  # leave padding out of the computation where this is faster

    encoder: Stack | None = submodule()
    decoder: Stack | None = submodule()
    encoder_embedding: Embedding | None = submodule()
    decoder_embedding: Embedding | None = submodule()
    tokens: Table = submodule()
    head: Head = submodule()

    def __new__(cls, config: ModelConfig | None = None) -> Self:
        """Return an empty model of the class for `config`; a copy or a pickle is made without one."""
        drafts = cls is Transformer and config is not None and config.drafting is not None
        kind: type[Any] = DraftingTransformer if drafts else cls
        return super().__new__(kind)

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        width, positions = config.hidden_size, config.max_position_embeddings
        size = config.embedding.width(width)
        self.tokens = config.embedding.tokens(config.vocab_size, width)
        cross = config.cross()
        self.decoder_tokens: Table | None = None
        if cross is not None and not config.embedding.shared:
            self.decoder_tokens = config.embedding.tokens(config.vocab_size, width)
        for name, part in (("encoder", config.encoder), ("decoder", config.decoder)):
            stack = embedding = None
            if part is not None:
                stack = build_stack(part, width, positions, cross if name == "decoder" else None, size)
                embedding = config.embedding.build(width, part.norm, part.dropout, stack.position)
            self.add_module(name, stack)
            self.add_module(f"{name}_embedding", embedding)
        self.head = config.head.build(config.head_shape())
        initialize(self, config.initializer_range)
        if config.weights is not None:
            quantize_weights(self, config.weights)
        freeze_pretrained_parameters(self, self.decoder)

    @property
    def supports_recurrence(self) -> bool:
        """Return whether the model reads a text in segments and has a memory of earlier segments."""
        return self.decoder is not None and self.decoder.memory is not None

    @names_wrong_types
    @arguments.documented_by(ModelInputs, DecoderInputs, Labels, OutputOptions)
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        langs: Tensor | None = None,
        *,
        segment_ids: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
        relation_ids: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        decoder_relation_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        neighbour_ids: Tensor | None = None,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        sentence_labels: Tensor | None = None,
        score_positions: Tensor | None = None,
        state: ModelState | None = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
        source_spans: Tensor | None = None,
    ) -> ModelOutput:
        """Run the model.

        Args:
            {ModelInputs}
            {DecoderInputs}
            {Labels}
            state: from an earlier output with `use_cache`; the ids are then the tokens that follow.
            use_cache: return the state.
            {OutputOptions}

        Returns `ModelOutput`; with labels its loss is the mean over labelled tokens or items, and in training
        also the auxiliary losses. Raises `InputError` for wrong shapes and texts beyond learned positions.
        """
        inputs = ModelInputs(
            input_ids,
            attention_mask,
            position_ids,
            document_ids,
            token_type_ids,
            langs,
            segment_ids,
            global_attention_mask,
            relation_ids,
            inputs_embeds,
            source_spans,
        ).with_placeholder_ids(choices=self.head.reads_choices)
        target = DecoderInputs(
            decoder_input_ids, decoder_attention_mask, decoder_relation_ids, decoder_inputs_embeds
        )
        goals = Labels.of(labels, shift_labels, sentence_labels, neighbour_ids, score_positions)
        options = OutputOptions(output_attentions, output_hidden_states)
        return self._run(inputs, target, goals, state, use_cache, options)

    def _run(
        self,
        inputs: ModelInputs,
        target: DecoderInputs,
        labels: Labels,
        state: ModelState | None,
        use_cache: bool,
        options: OutputOptions,
    ) -> ModelOutput:
        """Run the sides that the model has, one after the other, and its head."""
        if self.head.reads_choices:
            inputs, labels = labels.flatten_choices(self.head, inputs)
        if labels is not NO_LABELS:
            labels.check(self.head, self.encoder is not None)
        if self.encoder is not None and self.decoder is not None:
            return self._run_both(inputs, target.as_inputs(), labels, state, use_cache, options)
        single = "an encoder-only model" if self.encoder else "a decoder-only model"
        target.check_absent(single, inputs.source_spans)
        if self.decoder is None:
            refuse("an encoder-only model", state=state, use_cache=use_cache or None)
            encoded = self.runner("encoder").run(inputs, options, unpads=self.unpads)
            return self._finish(encoded, labels, options, inputs.text_ids)
        if state is None and use_cache:
            state = self.new_state()
        decoded = self.runner("decoder").run(inputs, options, state, unpads=self.unpads)
        if labels is not NO_LABELS:
            labels = labels.shifted(self.head, inputs.document_ids, decoded.tokens, self.config.vocab_size)
        return self._finish(decoded, labels, options, inputs.text_ids, state)

    def _run_both(
        self,
        inputs: ModelInputs,
        decoder_inputs: ModelInputs,
        labels: Labels,
        state: ModelState | None,
        use_cache: bool,
        options: OutputOptions,
    ) -> ModelOutput:
        """Run an encoder-decoder: the source `inputs`, unless it is in `state`, then the target so far."""
        assert self.decoder is not None
        encoded, cached = None, use_cache or state is not None
        if state is not None:
            refuse("an encoder-decoder", document_ids=inputs.document_ids)
            marks, spans = inputs.global_attention_mask, inputs.source_spans
            refuse("a source that was read already", global_attention_mask=marks, source_spans=spans)
            check_same_source(inputs.text_ids, state)
        else:
            encoded = self.read_source(inputs, options)
            layers = self.decoder.new_states(0) if use_cache else ()
            state = encoded.source_state(layers, inputs, self.decoder.owner)
        if decoder_inputs.input_ids is None and self.head.predicts_next:
            shifted = self.shifted_right(labels.labels, None)
            decoder_inputs = dataclasses.replace(decoder_inputs, input_ids=shifted)
        elif decoder_inputs.input_ids is None:
            refuse("an encoder-decoder without decoder_input_ids", inputs_embeds=inputs.inputs_embeds)
            own = decoder_inputs.attention_mask
            mask = inputs.attention_mask if own is None else own
            shifted = self.shifted_right(inputs.input_ids, mask)
            decoder_inputs = dataclasses.replace(decoder_inputs, input_ids=shifted, attention_mask=mask)
        decoded = self.runner("decoder").run(decoder_inputs, options, state, cached)
        return self._finish(decoded, labels, options, inputs.text_ids, state, encoded)

    @names_wrong_types
    def encode(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        reserve: int = 0,
        **inputs: Tensor | None,
    ) -> ModelState:
        """Return the initial state for decoding with an encoder-decoder: the encoded source [B, S].

        reserve: number of new tokens to allocate the KV cache for. inputs: of the source, with their names in
        `forward` (`polyformer.core.sequence.tokens.ModelInputs`).
        """
        assert self.decoder is not None
        source = ModelInputs(input_ids, attention_mask, **inputs)
        layers, owner = self.decoder.new_states(reserve), self.decoder.owner
        return self.read_source(source).source_state(layers, source, owner)

    def read_source(self, inputs: ModelInputs, options: OutputOptions = NO_EXTRA_OUTPUTS) -> StackOutput:
        """Return the output of the encoder of an encoder-decoder for the source."""
        refuse("an encoder-decoder", document_ids=inputs.document_ids)
        inputs = dataclasses.replace(inputs, source_spans=None)  # the decoder reads them
        return self.runner("encoder").run(inputs, options, unpads=self.unpads)

    @names_wrong_types
    def new_state(self, reserve: int = 0, cache: CachePolicy | str | None = None) -> ModelState:
        """Return a decoder's state before its first token: KV caches for `reserve` tokens, with a policy."""
        stack = self.decoder
        assert stack is not None
        return ModelState(NO_TOKENS, with_policy(stack, stack.new_states(reserve), cache), owner=stack.owner)

    def following(self, ids: Tensor, state: ModelState, **inputs: Tensor) -> tuple[Tensor, ModelState]:
        """Return the hidden states [B, T, E] of tokens [B, T] after `state`, and the next state.

        For tokens that the model itself has chosen: neither they nor the inputs of `forward` by name are
        checked, and nothing is predicted.
        """
        return self.runner("decoder").following(ModelInputs(ids, **inputs), state)

    def logits_at(
        self, output: ModelOutput, places: "slice | Tensor", neighbour_ids: Tensor | None = None
    ) -> Tensor:
        """Return the head's logits [B, K, V] only at `places` of `output`. neighbour_ids: [B, K, k]."""
        return self.predictions(output.last_hidden_state[:, places], neighbour_ids)

    def predictions(self, hidden: Tensor, neighbour_ids: Tensor | None = None) -> Tensor:
        """Return the head's predictions for hidden states [B, T, E]; [B, T, V] if it predicts tokens."""
        inputs = HeadInput(hidden, None, self._output_weight(), neighbour_ids=neighbour_ids)
        predicted = self.head(inputs, None)[1]()
        return predicted[0] if isinstance(predicted, tuple) else predicted

    def next_logits(self, output: ModelOutput) -> Tensor:
        """Return the logits [B, V] of the next token, computed only for the last position of `output`."""
        return self.logits_at(output, slice(-1, None)).squeeze(1)

    def generate(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        config: GenerationConfig | None = None,
        streamer: Callable[[Tensor], None] | None = None,
        decode: Decode | None = None,
        **more: Any,
    ) -> Generated:
        """Continue or translate `input_ids`; see `polyformer.models.generation.generate` for the other
        arguments (`generator`, `token_type_ids`, ...) and settings (`max_new_tokens=20`).

        Without a `config` the settings of the checkpoint apply, if it has some (`generation`).
        """
        if config is None and self.generation is not None:
            config = from_hub(self.generation)
        return generate(self, input_ids, attention_mask, config, streamer, decode, **more)

    def shifted_right(self, ids: Tensor | None, mask: Tensor | None) -> Tensor:
        """Return labels or a text [B, T] shifted right after the start token; left padding stays in place."""
        if ids is None:
            raise InputError("decoder_input_ids or labels: an encoder-decoder needs one of them")
        if self.config.special.bos is None:
            raise InputError(
                "special.bos: an encoder-decoder needs a start token for its output; set it in the config"
            )
        start, pad = self.config.special.bos, self.config.special.pad or 0
        # Without slices of a length less one, which an exported graph could not have for every length.
        first = torch.arange(ids.shape[1], device=ids.device) == 0
        later = ids.masked_fill(ids == -100, pad).roll(1, 1).masked_fill(first, start)
        # With padding on the left, the start token belongs at the first real token of each row.
        return later if mask is None else later.masked_fill((mask.cumsum(1) == 1) & (mask != 0), start)

    def runner(self, name: str) -> StackRunner:
        """Return the encoder or the decoder with its present modules."""
        encoder = name == "encoder"
        stack, embedding = (
            (self.encoder, self.encoder_embedding) if encoder else (self.decoder, self.decoder_embedding)
        )
        assert stack is not None
        assert embedding is not None
        table = self.tokens if encoder else self._output_table()
        predict = None if encoder else self.predictions
        return StackRunner(name, self.config, table, embedding, stack, self.head, predict)

    def _output_weight(self) -> Tensor | Int8Weight | AdaptiveEmbedding:
        """Return the matrix [V, E] of a tied head. A pipeline's last stage has it only for such a head."""
        table = self._output_table()
        weight: Any = getattr(table, "weight", table)
        return table if isinstance(table, (Int8Weight, AdaptiveEmbedding)) else weight

    def _output_table(self) -> Table:
        """Return the token table of the decoder, or else of the encoder: a tied head reads it."""
        return self.tokens if self.decoder_tokens is None else self.decoder_tokens

    def _finish(
        self,
        output: StackOutput,
        labels: Labels,
        options: OutputOptions,
        ids: Tensor | None,
        state: ModelState | None = None,
        encoded: StackOutput | None = None,
    ) -> ModelOutput:
        """Return predictions, the loss and all requested outputs, from the output of the last side.

        ids: of the text or source. encoded: the output of the encoder of an encoder-decoder.
        """
        if output.shard is not None:
            labels = labels.local_part(output.shard)
        valid, table = output.output_tokens.new_valid(output.hidden.shape[1]), self._output_weight()
        head_input = HeadInput(output.hidden, valid, table, output.last_layer, ids=ids)
        if labels is not NO_LABELS:
            head_input = labels.add_to(head_input, self.config.vocab_size)
        loss, predictions = self.head(head_input, labels.labels)
        losses = None
        if loss is not None:
            loss = mean_loss_over_group(loss, labels.labels, output.shard)
            losses = {"prediction": loss.detach()}
            others = encoded.auxiliary_losses if encoded else {}
            own = {}
            if self.training and output.halting is not None and labels.labels is not None:
                own = output.halting.losses(loss, ExitLoss(self.head, head_input, labels.labels))
            for name, term in sum_auxiliary_losses(output.auxiliary_losses, others, own).items():
                losses[name] = term.detach()
                loss = loss + term if self.training else loss  # evaluation measures only predictions
        attentions, cross_attentions = tuple(output.attentions) if options.output_attentions else None, None
        both = self.encoder is not None and self.decoder is not None
        if both and attentions is not None:  # a layer records self-attention, then cross-attention
            attentions, cross_attentions = attentions[::2], attentions[1::2]
        next_state = None
        if state is not None and output.layer_states is not None:
            assert self.decoder is not None
            next_state = output.next_state(self.decoder, state)
        return ModelOutput(
            loss,
            output.hidden,
            predictions,
            output.hidden_states,
            attentions,
            cross_attentions,
            encoder_last_hidden_state=encoded.hidden if encoded else None,
            encoder_hidden_states=encoded.hidden_states if encoded else None,
            encoder_attentions=tuple(encoded.attentions) if encoded and options.output_attentions else None,
            state=next_state,
            losses=losses,
            slots=output.slots,
        )


class DraftingTransformer(Transformer):
    """A decoder with parts that predict further tokens, which training and `generate(draft="self")` use."""

    drafting: Drafting = submodule()

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        assert config.drafting is not None
        if not self.head.predicts_next:
            raise InputError(
                f"drafting: it drafts what the head verifies, and {quote(config.head.kind)} predicts no next "
                "token; use the head 'language_model', or leave drafting out"
            )
        self.drafting = config.drafting.build(config.drafting_shape())
        initialize(self.drafting, config.initializer_range)
        if config.weights is not None:
            quantize_weights(self.drafting, config.weights)
        if config.drafting.alone:
            self.requires_grad_(False)
            self.drafting.requires_grad_()

    def start_drafting(self) -> None:
        """Set the new parts of a trained model as they begin; see `Drafting.start_from`."""
        weight = getattr(self.head, "weight", None)
        weight = self._output_weight() if weight is None else weight
        if isinstance(weight, Tensor) and weight.shape[1] == self.config.drafting_shape().hidden_size:
            self.drafting.start_from(weight)

    def _finish(
        self,
        output: StackOutput,
        labels: Labels,
        options: OutputOptions,
        ids: Tensor | None,
        state: ModelState | None = None,
        encoded: StackOutput | None = None,
    ) -> ModelOutput:
        """Return the same, in training with the loss of the further tokens in the loss."""
        result = super()._finish(output, labels, options, ids, state, encoded)
        if result.loss is None or result.losses is None or labels.labels is None or not self.training:
            return result
        if output.shard is not None or output.tokens.seen > output.hidden.shape[1]:
            raise InputError(
                "drafting: its loss is of whole texts, read in one call of one process; leave the state out "
                "and parallel.context at 1"
            )
        valid, table = output.tokens.new_valid(output.hidden.shape[1]), self._output_weight()

        def loss(hidden: Tensor, labels: Tensor) -> Tensor:
            term, _ = self.head(HeadInput(hidden, valid, table), labels)
            assert term is not None
            return term

        call = DraftingInput(output.hidden, output.tokens, ids, self._output_table(), loss)
        with collect_auxiliary_losses() as terms:
            total = self.drafting.loss(call, labels.labels)
        losses = {**result.losses, "drafting": total.detach()}
        for term in sum_auxiliary_losses(terms).values():
            total = total + term
        return dataclasses.replace(result, loss=result.loss + total, losses=losses)
