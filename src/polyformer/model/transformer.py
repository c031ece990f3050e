"""The one public model: token table, an encoder or a decoder or both, and a head."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from polyformer.architecture import ModelConfig
from polyformer.attention import SoftmaxConfig
from polyformer.core.auxiliary_losses import AuxiliaryLosses, collect_auxiliary_losses, sum_auxiliary_losses
from polyformer.core.errors import InputError
from polyformer.core.evaluation_mode import training_pass
from polyformer.core.initialization import initialize
from polyformer.core.labels import next_labels
from polyformer.generation import Decode, Generated, GenerationConfig, generate
from polyformer.generation.hub import from_hub
from polyformer.heads import HeadInput, LastLayer
from polyformer.model.inputs import check_given, check_ids, check_labels
from polyformer.model.saving import PretrainedMixin
from polyformer.ops.softmax import recorded
from polyformer.outputs import ModelOutput, ModelState
from polyformer.patterns import Causal, Full
from polyformer.patterns.marked import reads_marks
from polyformer.position import related
from polyformer.sequence.context import Context
from polyformer.sequence.tokens import NO_TOKENS, Given, Tokens
from polyformer.sequence.unpadding import unpadding
from polyformer.stack import Embedding, LayerState, Source, Stack

Goals = tuple[Tensor | None, Tensor | None]
"""Labels of the tokens, and of the text as a whole."""


@dataclasses.dataclass(frozen=True, eq=False)
class Encoded:
    """What a stack made of its input."""

    hidden: Tensor
    tokens: Tokens
    layers: tuple[LayerState, ...] | None
    hidden_states: tuple[Tensor, ...] | None
    attentions: list[Tensor]
    last: LastLayer | None
    auxiliary_losses: AuxiliaryLosses


class Transformer(PretrainedMixin):
    """See `forward`. `recompute` on its stacks trades time for memory in training; `unpads` leaves padding
    out of what is computed, where that pays."""

    config_type = ModelConfig
    config: ModelConfig
    unpads = True

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        width, positions = config.hidden_size, config.max_position_embeddings
        size = config.embedding.width(width)
        self.tokens = nn.Embedding(config.vocab_size, size)
        both = config.encoder is not None and config.decoder is not None
        self.decoder_tokens = (
            nn.Embedding(config.vocab_size, size) if both and not config.embedding.shared else None
        )
        for name, stack in (("encoder", config.encoder), ("decoder", config.decoder)):
            cross = both and name == "decoder"
            self.add_module(name, None if stack is None else Stack(stack, width, positions, cross, size))
            self.add_module(
                f"{name}_embedding",
                None if stack is None else Embedding(config.embedding, width, stack.norm, stack.dropout),
            )
        self.head = config.head.build(config.head_shape())
        initialize(self, config.initializer_range)

    encoder: Stack | None
    decoder: Stack | None
    encoder_embedding: Embedding | None
    decoder_embedding: Embedding | None

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        langs: Tensor | None = None,
        segment_ids: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
        relation_ids: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        decoder_relation_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        sentence_labels: Tensor | None = None,
        state: ModelState | None = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> ModelOutput:
        """Run the model. In training it waits for calls of `generate` in other threads to end.

        Args:
            input_ids: [B, T], the text; of an encoder-decoder the source.
            attention_mask: [B, T], 1 for real tokens and 0 for padding, on either side.
            position_ids: [B, T] or [T]; by default real tokens are counted from 0 in every document.
            document_ids: [B, T], not decreasing: documents packed in one row do not see one another.
            token_type_ids, langs: [B, T], where the model has token types or languages.
            segment_ids: [B, T], the sentence (or other part) that each token belongs to, for patterns and
                positions that read a structure; of an encoder-decoder in the source.
            relation_ids: [B, T, T], a label of what each token (axis 1) is to each (axis 2), -1 for nothing,
                where the position scheme embeds them; with a state [B, T, all tokens so far].
            global_attention_mask: [B, T], 1 for tokens that the pattern `Marked()` makes global; with a state
                for the new tokens, of an encoder-decoder for the source.
            decoder_input_ids, decoder_attention_mask: [B, U], what an encoder-decoder has written so far; by
                default `labels` shifted right by one, or for a head that predicts no tokens the source is.
            decoder_relation_ids: as relation_ids, for what an encoder-decoder writes.
            inputs_embeds, decoder_inputs_embeds: [B, T, E], token vectors in place of the ids, as wide as
                the token table.
            labels: what should be predicted, -100 where nothing should. For a decoder alone they are the
                input_ids: the shift by one happens here, and nothing is predicted across documents.
            shift_labels: [B, T], in place of a decoder's labels: what each token should predict.
            sentence_labels: [B], of the whole text, where the head predicts something of it too.
            state: from an earlier output with `use_cache`; the ids are then the tokens that follow.
            use_cache: return the state.
            output_attentions: return the attention weights (and run attention densely).
            output_hidden_states: return every layer's input and the final output.

        Returns:
            `ModelOutput`; with labels its loss is the mean over labelled tokens or items, and in training
            what parts of the model add to it.

        Raises:
            InputError: shapes that do not fit, or a text longer than learned positions reach.
        """
        options = {"attentions": output_attentions, "hidden": output_hidden_states}
        given = Given(
            ids=input_ids,
            mask=attention_mask,
            positions=position_ids,
            documents=document_ids,
            types=token_type_ids,
            langs=langs,
            segments=segment_ids,
            marks=global_attention_mask,
            relations=relation_ids,
            vectors=inputs_embeds,
        )
        written = Given(
            ids=decoder_input_ids,
            mask=decoder_attention_mask,
            relations=decoder_relation_ids,
            vectors=decoder_inputs_embeds,
        )
        given, written = given.with_ids("inputs_embeds"), written.with_ids("decoder_inputs_embeds")
        if sentence_labels is not None and not self.head.predicts_sentence:
            raise InputError(
                "sentence_labels: this model's head predicts nothing of the whole text; leave "
                "them out, or use the head 'pretraining'"
            )
        check_labels(labels, sentence_labels, self.head.predicts_next)
        goals = labels, sentence_labels
        if shift_labels is not None and (labels is not None or self.encoder or not self.head.predicts_next):
            raise InputError(
                "shift_labels: a decoder's language-model head takes them in place of labels; "
                "give labels alone"
            )
        with training_pass(self):
            if self.encoder is not None and self.decoder is not None:
                return self._translate(given, written, goals, state, use_cache, options)
            self._refuse(
                "an encoder alone" if self.encoder else "a decoder alone",
                decoder_input_ids=decoder_input_ids,
                decoder_attention_mask=decoder_attention_mask,
                decoder_relation_ids=decoder_relation_ids,
                decoder_inputs_embeds=decoder_inputs_embeds,
            )
            if self.decoder is None:
                self._refuse("an encoder alone", state=state, use_cache=use_cache or None)
                return self._finish(self._run("encoder", given, options), goals, options, given.read_ids)
            past = state or (self.new_state() if use_cache else None)
            ran = self._run("decoder", given, options, past)
            if shift_labels is not None:
                goals = shift_labels, sentence_labels
            elif labels is not None and self.head.predicts_next:
                goals = (
                    next_labels(labels, document_ids, ran.tokens.new_valid(labels.shape[1])),
                    sentence_labels,
                )
            return self._finish(ran, goals, options, given.read_ids, past)

    def _translate(
        self,
        given: Given,
        written: Given,
        goals: Goals,
        past: ModelState | None,
        use_cache: bool,
        options: dict[str, bool],
    ) -> ModelOutput:
        """What an encoder-decoder makes of the source `given` and what was `written` so far."""
        assert self.decoder is not None
        self._refuse("an encoder-decoder", document_ids=given.documents)
        encoded, cached = None, use_cache or past is not None
        if past is not None:
            self._refuse("a source that was read already", global_attention_mask=given.marks)
        else:
            encoded = self._run("encoder", given, options)
            past = self._source_state(encoded, self.decoder.new_states(0) if use_cache else ())
        if written.ids is None and self.head.predicts_next:
            written = dataclasses.replace(written, ids=self.shifted_right(goals[0], None))
        elif written.ids is None:
            self._refuse("an encoder-decoder without decoder_input_ids", inputs_embeds=given.vectors)
            mask = given.mask if written.mask is None else written.mask
            written = dataclasses.replace(written, ids=self.shifted_right(given.ids, mask), mask=mask)
        ran = self._run("decoder", written, options, past, cached)
        return self._finish(ran, goals, options, given.read_ids, past, encoded)

    def encode(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        reserve: int = 0,
        *,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        langs: Tensor | None = None,
        segment_ids: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
        relation_ids: Tensor | None = None,
    ) -> ModelState:
        """The state that an encoder-decoder's decoding starts from, the source [B, S] read once.

        reserve: room for so many tokens to be written. The others are of the source, as `forward` takes them.
        """
        assert self.decoder is not None
        self._refuse("an encoder-decoder", document_ids=document_ids)
        given = Given(
            ids=input_ids,
            mask=attention_mask,
            positions=position_ids,
            types=token_type_ids,
            langs=langs,
            segments=segment_ids,
            marks=global_attention_mask,
            relations=relation_ids,
        )
        encoded = self.read_source(given)
        return self._source_state(encoded, self.decoder.new_states(reserve))

    def read_source(self, given: Given, attentions: bool = False, hidden: bool = False) -> Encoded:
        """What the encoder makes of `given`."""
        assert self.encoder is not None
        return self._run("encoder", given, {"attentions": attentions, "hidden": hidden})

    def new_state(self, reserve: int = 0) -> ModelState:
        """The state of a decoder before its first token, with room for `reserve` tokens."""
        assert self.decoder is not None
        return ModelState(NO_TOKENS, self.decoder.new_states(reserve))

    def logits_at(self, output: ModelOutput, places: "slice | Tensor") -> Tensor:
        """The head's logits [B, K, V] at these places of `output`; those of others are not computed."""
        _, predictions = self.head(self._head_input(output.last_hidden_state[:, places], None), None)
        return predictions()

    def next_logits(self, output: ModelOutput) -> Tensor:
        """The head's word [B, V] on what follows the last position of `output`; it sees no other."""
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
        """Continue or translate `input_ids`: see `polyformer.generation.generate`, whose other arguments
        (`generator`, `token_type_ids`, ...) and settings (`max_new_tokens=20`) this takes too.

        Without a `config` by the settings that the checkpoint came with, where it had any (`generation`).
        """
        if config is None and self.generation is not None:
            config = from_hub(self.generation)
        return generate(self, input_ids, attention_mask, config, streamer, decode, **more)

    def _source_state(self, encoded: Encoded, layers: tuple[LayerState, ...]) -> ModelState:
        return ModelState(NO_TOKENS, layers, encoded.hidden, encoded.tokens.valid, encoded.tokens.length)

    def _run(
        self,
        side: str,
        given: Given,
        options: dict[str, bool],
        past: ModelState | None = None,
        cached: bool = True,
    ) -> Encoded:
        """One side's stack over its ids, after the tokens in `past`; without the padding where that pays."""
        prefix = "decoder_" if side == "decoder" and self.encoder else ""
        check_ids(f"{prefix}input_ids", given.ids, self.config.vocab_size)
        before = getattr(self.get_submodule(side).position, "offset", 0)
        check_given(given, past.tokens.length if past else 0, prefix, before)
        plain = past is None and not options["attentions"] and not self.config.head.again
        found = unpadding(given) if plain and self.unpads and self._sees_all(side) else None
        if found is None:
            return self._compute(side, given, options, past, cached)
        ran = self._compute(side, found.given(given), options)
        seen = ran.hidden_states
        return dataclasses.replace(
            ran,
            hidden=found.unpack(ran.hidden),
            tokens=_tokens(NO_TOKENS, given),
            hidden_states=None if seen is None else tuple(found.unpack(one) for one in seen),
        )

    def _marked(self, given: Given, ids: Tensor, stack: Stack) -> Given:
        """With the global tokens that the head asks for, where a pattern of the stack reads marks."""
        mask = (
            None if given.mask is None else given.mask[:, -ids.shape[1] :]
        )  # of a decoder it has the past too
        marks = self.config.head.marks(ids, mask)
        if marks is None or not reads_marks(stack.mechanism):
            return given
        return dataclasses.replace(given, marks=marks)

    def _sees_all(self, side: str) -> bool:
        """Whether every token of a side sees all others of its document (or all before it)."""
        stack = getattr(self.config, side)
        mechanism = stack.attention.mechanism
        return isinstance(mechanism, SoftmaxConfig) and mechanism.pattern in (None, Full(), Causal())

    def _compute(
        self,
        side: str,
        given: Given,
        options: dict[str, bool],
        past: ModelState | None = None,
        cached: bool = True,
    ) -> Encoded:
        """One side's stack over all its ids, padding too."""
        ids = given.ids
        assert ids is not None
        stack, embedding = self.get_submodule(side), self.get_submodule(f"{side}_embedding")
        assert isinstance(stack, Stack)
        assert isinstance(embedding, Embedding)
        if given.marks is None:
            given = self._marked(given, ids, stack)
        elif not reads_marks(stack.mechanism):
            raise InputError(
                f"global_attention_mask: no pattern of the {side} reads it; add `| Marked()` to its attention"
            )
        tokens = _tokens(past.tokens if past else NO_TOKENS, given)
        table = self.tokens if side == "encoder" or self.decoder_tokens is None else self.decoder_tokens
        pos = tokens.last(ids.shape[1], ids.device)
        source = None
        if past is not None and self.encoder is not None:
            source = Source(
                past.source, Context(ids.shape[1], past.source_length, kv_valid=past.source_valid)
            )
        collect: list[Tensor] | None = [] if options["hidden"] or self.config.head.again else None
        context = tokens.context(ids.shape[1], causal=side == "decoder")
        if given.relations is not None:
            context = related(context, given.relations, len(ids), stack.position)
        states = past.layers if past is not None and cached else None
        vectors = table(ids) if given.vectors is None else given.vectors
        x = embedding(vectors, stack.position, pos, given)
        looking = recorded() if options["attentions"] else contextlib.nullcontext([])
        with looking as records, collect_auxiliary_losses() as found:
            hidden, layers = stack(x, pos, context, source, states, collect)
        last = None
        if collect is not None and self.config.head.again:
            read = collect[-2]
            last = LastLayer(read, pos, lambda x: stack.again(x, read, context))
        seen = tuple(collect) if collect is not None and options["hidden"] else None
        return Encoded(hidden, tokens, layers, seen, records, last, found)

    def _finish(
        self,
        ran: Encoded,
        goals: Goals,
        options: dict[str, bool],
        ids: Tensor | None,
        past: ModelState | None = None,
        encoded: Encoded | None = None,
    ) -> ModelOutput:
        """The head's word on what a stack made of a text `ids`, and everything else that was asked for."""
        valid = ran.tokens.new_valid(ran.hidden.shape[1])
        inputs = self._head_input(ran.hidden, valid, ran.last, goals[1], ids)
        loss, predictions = self.head(inputs, goals[0])
        losses = None
        if loss is not None:
            losses = {"prediction": loss.detach()}
            for name, term in sum_auxiliary_losses(
                ran.auxiliary_losses, encoded.auxiliary_losses if encoded else {}
            ).items():
                losses[name] = term.detach()
                loss = loss + term if self.training else loss  # an evaluation measures predictions alone
        both = self.encoder is not None and self.decoder is not None
        records = tuple(ran.attentions)
        state = None
        if past is not None and ran.layers is not None:
            state = dataclasses.replace(past, tokens=ran.tokens, layers=ran.layers, source=None)
        wanted = options["attentions"]
        return ModelOutput(
            loss,
            ran.hidden,
            predictions,
            ran.hidden_states,
            attentions=(records[::2] if both else records) if wanted else None,
            cross_attentions=records[1::2] if both and wanted else None,
            encoder_last_hidden_state=encoded.hidden if encoded else None,
            encoder_hidden_states=encoded.hidden_states if encoded else None,
            encoder_attentions=tuple(encoded.attentions) if encoded and wanted else None,
            state=state,
            losses=losses,
        )

    def _head_input(
        self,
        hidden: Tensor,
        valid: Tensor | None,
        last: LastLayer | None = None,
        sentence_labels: Tensor | None = None,
        ids: Tensor | None = None,
    ) -> HeadInput:
        table = self.tokens if self.decoder_tokens is None else self.decoder_tokens
        return HeadInput(hidden, valid, table.weight, last, sentence_labels, ids)

    def shifted_right(self, ids: Tensor | None, mask: Tensor | None) -> Tensor:
        """Labels or a text [B, T] one token later, after the token that output starts from; padding on the
        left, which `mask` [B, T] shows, stays where it is."""
        if ids is None:
            raise InputError("decoder_input_ids or labels: an encoder-decoder needs one of them")
        if self.config.special.bos is None:
            raise InputError(
                "special.bos: this model does not know what its output starts from; set it in the config"
            )
        start, pad = self.config.special.bos, self.config.special.pad or 0
        later = torch.cat(
            [ids.new_full((len(ids), 1), start), ids[:, :-1].masked_fill(ids[:, :-1] == -100, pad)], 1
        )
        return later if mask is None else later.masked_fill((mask.cumsum(1) == 1) & (mask != 0), start)

    def _refuse(self, what: str, **given: Any) -> None:
        for name, value in given.items():
            if value is not None:
                raise InputError(f"{name}: {what} does not take it; leave it out")


def _tokens(past: Tokens, given: Given) -> Tokens:
    """The tokens in `past` followed by those that are given."""
    assert given.ids is not None
    return past.extended(given.ids, given.mask, given.positions, given.documents, given.segments, given.marks)
