"""Subjects of models of this library and of transformers, in memory or by their names."""

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyformer.applications.audit.checks import Sample, Subject, expanded, module_subject
from polyformer.core.errors import InputError
from polyformer.core.files import read_json
from polyformer.core.foreign_checkpoints import gguf_file, load_by_transformers
from polyformer.core.paths import checked_path
from polyformer.core.sequence.context import positions_from_mask
from polyformer.models.architectures import Transformer, VisionTransformer, load_pretrained
from polyformer.models.architectures.pretrained import CONFIG
from polyformer.training.recipes.run import is_checkpoint, open_model

SOURCE, FIRST = 7, 3
"""Tokens of the source of an encoder-decoder, and the first id that is drawn: special ids come before."""

KINDS = {
    "ForCausalLM": "AutoModelForCausalLM",
    "LMHeadModel": "AutoModelForCausalLM",
    "ForConditionalGeneration": "AutoModelForSeq2SeqLM",
    "MTModel": "AutoModelForSeq2SeqLM",
    "ForMaskedLM": "AutoModelForMaskedLM",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForTokenClassification": "AutoModelForTokenClassification",
}
"""By the end of the saved class's name: the class of transformers that loads it; AutoModel loads the rest."""


def load_model(name: str, device: torch.device) -> nn.Module:
    """Return the model of a run, a folder, a GGUF file or a name on the hub; raise `InputError` for others.

    transformers loads the folders that it has saved, and names on the hub.
    """
    folder = checked_path(name)
    if folder.exists() and not _is_saved_by_transformers(folder):
        return open_model(folder, str(device))
    config = load_by_transformers("AutoConfig", name)
    saved = (getattr(config, "architectures", None) or [""])[0]
    for ending, kind in KINDS.items():
        if saved.endswith(ending):
            try:
                return load_by_transformers(kind, name).to(device).eval()
            except InputError:
                break  # such as speech to text, which has another kind
    return load_by_transformers("AutoModel", name).to(device).eval()


def _is_saved_by_transformers(folder: Path) -> bool:
    if not is_checkpoint(folder) or gguf_file(folder) is not None:
        return False
    return "model_type" in read_json(folder / CONFIG, dict)


def subjects(model: nn.Module, call: Callable[..., Any] | None = None, **options: Any) -> list[Subject]:
    """Return the inputs of a model to audit: an encoder-decoder has a target and a source."""
    if call is None and isinstance(model, Transformer | VisionTransformer):
        return _polyformer(model, **options)
    if call is None and hasattr(model, "get_input_embeddings") and hasattr(model, "config"):
        return _transformers(model, **options)
    return [module_subject(model, call, **options)]


def _ids(size: int, special: set[int]) -> Sample:
    """Return a function that draws ids without the special ones."""
    ids = torch.tensor([n for n in range(min(size, 1000)) if n not in special][FIRST if size > 9 else 0 :])

    def draw(rows: int, length: int, generator: torch.Generator) -> Tensor:
        return ids[torch.randint(len(ids), (rows, length), generator=generator)]

    return draw


def _extra(sample: Sample) -> Tensor:
    return sample(1, SOURCE, torch.Generator().manual_seed(7))


def _fixed_sample(main: str, config: Any) -> Sample:
    """Return a function that draws images or audio."""
    if main == "pixel_values":
        size = config.image_size
        shape = (config.num_channels, *(size if isinstance(size, list | tuple) else (size, size)))
    elif main == "input_features":
        shape = (config.num_mel_bins, 2 * config.max_source_positions)
    elif main == "input_values":
        shape = (400,)
    else:
        raise InputError(f"model: expected an input of tokens, an image or audio, got {main}; pass call=...")
    return lambda rows, length, generator: torch.randn(rows, *shape, generator=generator)


# Models of this library


def _polyformer(model: Transformer | VisionTransformer, **options: Any) -> list[Subject]:
    common: dict[str, Any] = {"name": "model", "module": model, "save": _round_trip, **options}
    if isinstance(model, VisionTransformer):
        sample = _fixed_sample("pixel_values", model.config)
        common |= {"call": lambda module, x: module(x).last_hidden_state, "sample": sample}
        return [Subject(accepts=frozenset(), causal=False, fixed=True, **common)]
    sample = _ids(model.config.vocab_size, set())
    both, other = model.encoder is not None and model.decoder is not None, _extra(sample)
    main, mask = ("decoder_input_ids", "decoder_attention_mask") if both else ("input_ids", "attention_mask")

    def call(module: Any, x: Tensor, attention_mask: Any = None, state: Any = None, **more: Any) -> Any:
        source = {"input_ids": other.to(x.device).expand(len(x), -1)} if both and state is None else {}
        output = module(**{main: x, mask: attention_mask}, state=state, **source, **more)
        if "labels" in more:
            return output.loss
        aligned = output.logits.shape[:2] == x.shape and output.logits.dim() == 3
        shown = output.logits if aligned else output.last_hidden_state
        return (shown, output.state) if "use_cache" in more else shown

    def read(module: Any, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        target = other.to(x.device).expand(len(x), -1)
        return module(x, attention_mask, decoder_input_ids=target).last_hidden_state.flatten(1)

    predicts, masked = model.head.predicts_next, {"attention_mask"}
    accepts = masked | (set() if both else {"document_ids"}) | ({"labels"} if predicts else set())
    target = Subject(
        call=call,
        accepts=frozenset(accepts if model.decoder is None else accepts | {"state", "use_cache"}),
        sample=sample,
        causal=model.decoder is not None,
        side="target" if both else "",
        reorder=lambda state, index: state.reorder(index),
        generate=_generate if predicts and not both else None,
        **common,
    )
    if not both:
        return [target]
    source = {"call": read, "accepts": frozenset(masked), "causal": False, "side": "source"}
    return [target, dataclasses.replace(target, **source)]


def _round_trip(model: Any, folder: Path) -> nn.Module:
    model.save_pretrained(folder)
    return load_pretrained(folder)


def _generate(model: Any, ids: Tensor, mask: Tensor, new: int, cache: bool) -> Tensor:
    """Return the tokens of greedy search as logits of 0 and 1: by `generate`, or by whole passes."""
    size = ids.shape[1]
    if cache:
        ids = model.generate(ids, mask, max_new_tokens=new, special={"eos": []}).sequences
    else:
        for _ in range(new):
            best = model(ids, attention_mask=mask).logits[:, -1:].argmax(-1)
            ids, mask = torch.cat([ids, best], 1), nn.functional.pad(mask, (0, 1), value=1)
    return nn.functional.one_hot(ids[:, size:], model.config.vocab_size).float()


# Models of transformers


def _transformers(model: Any, **options: Any) -> list[Subject]:
    parameters = inspect.signature(model.forward).parameters
    config, both = model.config, bool(model.config.is_encoder_decoder)
    main, text = model.main_input_name, model.config.get_text_config()
    values = [item for part in (config, text) for item in vars(part).items()]
    special = {id for name, id in values if name.endswith("token_id") and isinstance(id, int)}
    ids = _ids(getattr(text, "vocab_size", 64), special)
    fixed = main != "input_ids"
    sample = _fixed_sample(main, config) if fixed else ids
    pad = None if fixed and not both else getattr(text, "pad_token_id", None)
    common: dict[str, Any] = {"name": "model", "module": model, "save": _saved_by_transformers, **options}
    common |= {"plain": _eager, "reorder": _reorder, "pad": pad}
    extras, result = dict[str, Tensor](), list[Subject]()
    if "pixel_values" in parameters and not fixed:
        extras["pixel_values"] = _extra(_fixed_sample("pixel_values", config.vision_config))
    if both:
        target = _Call("decoder_input_ids", "decoder_attention_mask", {main: _extra(sample)}, parameters)
        accepts = target.accepts(model)
        result.append(Subject(call=target, accepts=accepts, sample=ids, causal=True, side="target", **common))
        extras["decoder_input_ids"] = _extra(ids)
        common["side"] = "source"
    reads = _Call(main, "attention_mask", extras, parameters, whole=both)
    accepts = reads.accepts(model)
    reader = Subject(
        call=reads,
        accepts=accepts & {"attention_mask"} if both or fixed else accepts,
        sample=sample,
        causal=not both
        and (model.can_generate() or any(getattr(part, "is_causal", False) for part in model.modules())),
        fixed=fixed,
        generate=_transformers_generate if model.can_generate() and not fixed else None,
        **common,
    )
    return [*result, reader]


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call of a model of transformers: the input `main` with its mask, and the other inputs.

    Positions are counted over non-padding tokens and passed, as `generate` does. whole: the outputs are
    flattened, because they do not belong to the tokens of this input.
    """

    main: str
    mask: str
    extras: dict[str, Tensor]
    parameters: Any
    whole: bool = False

    @property
    def positions(self) -> str | None:
        """The name of the argument of positions, if there is any."""
        name = "decoder_position_ids" if self.main.startswith("decoder") else "position_ids"
        return name if name in self.parameters else None

    def accepts(self, model: Any) -> frozenset[str]:
        """Return what checks may pass."""
        names = {"attention_mask"} if self.mask in self.parameters else set[str]()
        cached = model.can_generate() or getattr(model.config, "is_decoder", False)
        if "past_key_values" in self.parameters and cached:
            names |= {"state", "use_cache"}
        if self.positions and cached:
            names.add("document_ids")
        if "labels" in self.parameters:
            names.add("labels")
            # The Trainer's rule: it leaves the scale of the loss to such models.
            keywords = any(p.kind is p.VAR_KEYWORD for p in self.parameters.values())
            if getattr(model, "accepts_loss_kwargs", keywords):
                names.add("num_items_in_batch")
        return frozenset(names)

    def __call__(self, model: Any, x: Tensor, **named: Any) -> Any:
        """Run the model."""
        from polyformer.models.attached.mask import positions_in_documents  # imports transformers

        state, mask, documents = (
            named.pop(name, None) for name in ("state", "attention_mask", "document_ids")
        )
        inputs = {self.main: x, **expanded(self.extras, x, model.dtype), **named}
        if self.positions and documents is not None:
            inputs[self.positions] = positions_in_documents(documents)
        elif self.positions:
            past = 0 if state is None else int(state.get_seq_length())
            full = x.new_ones(len(x), past + x.shape[1]) if mask is None else mask
            inputs[self.positions] = positions_from_mask(full)[:, past:]
        optional = {self.mask: mask, "past_key_values": state}
        inputs |= {name: value for name, value in optional.items() if value is not None}
        if "use_cache" in self.parameters:
            inputs.setdefault("use_cache", False)
        output = model(**inputs)
        if "labels" in named:
            return output.loss
        shown = self._outputs(output)
        return (shown, output.past_key_values) if "use_cache" in named else shown

    def _outputs(self, output: Any) -> Tensor:
        for name in ("logits", "last_hidden_state", "text_model_output"):
            if name in output:
                shown = getattr(output, name)
                shown = shown if isinstance(shown, Tensor) else shown.last_hidden_state
                return shown.flatten(1) if self.whole else shown
        return output[0]


def _reorder(state: Any, index: Tensor) -> Any:
    state.reorder_cache(index)
    return state


def _eager(model: Any) -> Any:
    model.set_attn_implementation("eager")
    return model


def _transformers_generate(model: Any, ids: Tensor, mask: Tensor, new: int, cache: bool) -> Tensor:
    """Return the logits of greedy search."""
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "num_beams": 1}
    options |= {"output_logits": True, "return_dict_in_generate": True, "pad_token_id": 0}
    return torch.stack(model.generate(ids, attention_mask=mask, use_cache=cache, **options).logits, 1)


def _saved_by_transformers(model: Any, folder: Path) -> nn.Module:
    model.save_pretrained(folder)
    return load_by_transformers(type(model).__name__, folder, dtype=model.dtype).eval()
