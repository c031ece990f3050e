"""The stages of a pipeline: ranges of layers of a model, each with the modules and parameters that it needs.

Layers are counted over the encoder and then the decoder. Huang et al. 2019 (GPipe), section 2. A parameter
may belong to several stages, such as a tied token table. `ParameterOwners` knows the processes that hold each
tensor, and transfers tensors to the first process.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from polyformer.core.errors import InputError, quote
from polyformer.core.ops.layers import AuxiliaryLosses, sum_auxiliary_losses
from polyformer.core.sequence.tokens import NO_TOKENS, ModelInputs
from polyformer.models.architectures.arguments import NO_EXTRA_OUTPUTS, DecoderInputs
from polyformer.models.architectures.transformer import DraftingTransformer, Transformer
from polyformer.models.outputs import ModelOutput, ModelState
from polyformer.nn.feedforward.experts import Experts
from polyformer.nn.stack import Stack
from polyformer.training.distributed.fully_sharded import full_tensor

SIDES = "encoder", "decoder"

SOURCE_ENTRIES = {field.name for field in dataclasses.fields(ModelInputs)} - {"input_ids", "inputs_embeds"}
"""Batch entries that the stages of the text or source read, in addition to ids or hidden states."""

TARGET_ENTRIES = {field.name for field in dataclasses.fields(DecoderInputs)}
"""Batch entries that the stages of the target of an encoder-decoder read."""

LOSS_WEIGHT = "share"
"""The entry of a microbatch with the weight of its loss in the loss of the step: one number, [1]."""


def stage_spans(layers: int, stages: int) -> list[range]:
    """Return the layers of each stage, evenly divided; raise `InputError` for too many stages."""
    if stages > layers:
        raise InputError(f"pipeline: {stages} stages for {layers} layers; use at most one a layer")
    edges = [layers * stage // stages for stage in range(stages + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(edges)]


def stacks(model: Transformer) -> dict[str, Stack]:
    """Return the encoder and the decoder, if the model has them."""
    return {name: stack for name in SIDES if (stack := getattr(model, name)) is not None}


def num_layers(model: Transformer) -> int:
    """Return the number of layers of the encoder and the decoder in total."""
    return sum(len(stack.groups) for stack in stacks(model).values())


def layers_by_stack(model: Transformer, span: range) -> dict[str, range]:
    """Return the layers of each stack for the layers `span` of the model."""
    own, before = {}, 0
    for name, stack in stacks(model).items():
        layers = len(stack.groups)
        start, stop = max(span.start - before, 0), min(span.stop - before, layers)
        if start < stop:
            own[name] = range(start, stop)
        before += layers
    return own


def check_pipelined(model: nn.Module) -> Transformer:
    """Return `model` if a pipeline can run it; otherwise raise `InputError` with the reason."""
    if not isinstance(model, Transformer):
        raise InputError(f"pipeline: it runs models of tokens, got {type(model).__name__}; set it to 1")
    if isinstance(model, DraftingTransformer):
        raise InputError("pipeline: the parts that draft need all layers in one process; set it to 1")
    for name, stack in stacks(model).items():
        config = getattr(model.config, name)
        reasons = {
            f"block {quote(config.block.kind)}": stack.reversible or config.block.stream_copies > 0,
            f"memory {quote(config.memory.kind)}": stack.memory is not None,
            "value_residual": stack.value_residual,
            f"depth {quote(config.depth.kind)}": stack.depth is not None,
            f"head {quote(model.config.head.kind)}": model.config.head.reruns_last_layer,
            "bias_rate of experts": any(
                isinstance(part, Experts) and part.config.bias_rate for part in stack.modules()
            ),
        }
        for part, refused in reasons.items():
            if refused:
                raise InputError(f"pipeline: the {part} needs all layers in one process; set it to 1")
    if len(stacks(model)) == 2 and not model.head.predicts_next:
        raise InputError(
            f"pipeline: the head {quote(model.config.head.kind)} reads the source in an encoder-decoder's "
            "decoder too, which has passed by; set it to 1"
        )
    return model


def modules_of_layers(model: Transformer, own: list[range]) -> list[nn.Module]:
    """Return the modules with parameters for the stages with these layers."""
    modules: list[nn.Module] = []
    for name, span in (part for layers in own for part in layers_by_stack(model, layers).items()):
        stack, table = stacks(model)[name], model.runner(name).tokens
        modules += [stack.position, *(stack.layers[stack.groups[layer]] for layer in span)]
        if span.start == 0:
            modules += [table, getattr(model, f"{name}_embedding"), *filter(None, [stack.convolution])]
        if span.stop == len(stack.groups):
            modules.append(stack.final_norm)
    if any(span.stop == num_layers(model) for span in own):
        embedding = model.config.embedding
        reads = embedding.tied or embedding.adaptive is not None
        modules += [model.head, *([model._output_table()] if reads else [])]
    return modules


class Placeholder(nn.Identity):
    """A placeholder for a module that only other stages have."""


def module_slots(model: Transformer) -> list[tuple[nn.Module, str]]:
    """Return the positions of modules that only some stages need, as parents and names in them."""
    parents: list[tuple[nn.Module, str]] = [(model, name) for name in ("tokens", "decoder_tokens", "head")]
    for name, stack in stacks(model).items():
        parents += [(stack.layers, str(group)) for group in range(len(stack.layers))]
        parents += [(stack, child) for child in ("final_norm", "convolution", "position")]
        parents.append((model, f"{name}_embedding"))
    return parents


class PipelineRoot(nn.Module):
    """The part of a model in a process, through which every pass of its stages runs.

    Sharding therefore has a single outermost module to follow.
    """

    def __init__(self, model: Transformer):
        super().__init__()
        self.model = model

    def forward(self, run: Callable[..., Any], *values: Any, **batch: Tensor) -> Any:
        """Return run(*values, **batch)."""
        return run(*values, **batch)


class Stage(nn.Module):
    """The layers `span` of the model in `root`.

    The first stage reads ids [B, T], later stages the output of the previous stage. A stage returns hidden
    states [B, T, E], preceded by the hidden states [B, S, E] of the source in the decoder of an
    encoder-decoder; the last stage returns the loss.

    precision: returns the autocast context. Auxiliary losses of layers enter the gradients in the stage in
    which they arise, so that they need not be sent.
    """

    root: PipelineRoot
    model: Transformer

    def __init__(
        self, root: PipelineRoot, span: range, precision: Callable[[], AbstractContextManager[object]]
    ):
        super().__init__()
        # Not submodules, because torch's schedules reset the gradients of sharded submodules at the start.
        self.__dict__.update(root=root, model=root.model)
        self.precision, model = precision, root.model
        self.dtype = next(model.parameters()).dtype
        self.layers_by_stack = layers_by_stack(model, span)
        self.reads_source = len(stacks(model)) == 2
        self.last = span.stop == num_layers(model)
        self.losses: list[Tensor] = []  # of each microbatch, the losses of this stage

    def forward(self, *values: Tensor, **batch: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Run the stage (see the class); floating-point values have the dtype of the parameters."""
        share = float(batch.pop(LOSS_WEIGHT))
        return self.root(self._pass, share, *values, **batch)

    def _pass(self, share: float, *values: Tensor, **batch: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Run `forward` for a microbatch; `share` is the weight of its loss."""
        with self.precision():
            if self.last:
                output, losses = self.output(*values, **batch)
                assert output.loss is not None
                loss = output.loss + sum(losses.values())
                self.losses.append(loss.detach().double())
                return loss
            hidden, losses = self.hidden(*values, **batch)
        x = hidden[-1].to(self.dtype)
        added = torch.stack(list(losses.values())).sum() if losses else x.new_zeros(())
        self.losses.append(added.detach().double())
        x = _WithLoss.apply(x, added, share) if losses else x
        return x if len(hidden) == 1 else (hidden[0].to(self.dtype).clone(), x)

    def evaluated(self, *values: Tensor, **batch: Tensor) -> ModelOutput | list[Tensor]:
        """Return the model output in the last stage, or the inputs of the next stage. No gradients."""
        with self.precision():
            return self.root(self.output if self.last else self.hidden, *values, **batch)[0]

    def hidden(self, *values: Tensor, **batch: Tensor) -> tuple[list[Tensor], AuxiliaryLosses]:
        """Return the inputs of the next stage, and the auxiliary losses of the layers."""
        self._set_spans()
        read, losses = self._read_source(values, batch)
        if "decoder" in self.layers_by_stack:
            state = _state(read[0], batch) if self.reads_source else None
            side = self.model.runner("decoder")
            unpads = self.model.unpads and state is None
            ran = side.run(self._target(read, batch), NO_EXTRA_OUTPUTS, state, cached=False, unpads=unpads)
            losses = sum_auxiliary_losses(losses, ran.auxiliary_losses)
            read = [read[0], ran.hidden] if self.reads_source else [ran.hidden]
        return list(read), losses if self.training else {}

    def output(self, *values: Tensor, **batch: Tensor) -> tuple[ModelOutput, AuxiliaryLosses]:
        """Return the output of the model, in the last stage, and the auxiliary losses of its layers."""
        self._set_spans()
        if not self.reads_source:
            return self.model(**_as_model_input(values[0]), **_without(batch, {"input_ids"})), {}
        read, losses = self._read_source(values, batch)
        more = {"decoder_inputs_embeds": read[1]} if len(read) > 1 else {}
        target = _without(batch, SOURCE_ENTRIES | {"input_ids"})
        return self.model(**target, **more, state=_state(read[0], batch)), losses if self.training else {}

    def _set_spans(self) -> None:
        for name, span in self.layers_by_stack.items():
            stacks(self.model)[name].layer_range = span

    def _read_source(
        self, values: Sequence[Tensor], batch: dict[str, Tensor]
    ) -> tuple[Sequence[Tensor], AuxiliaryLosses]:
        """Return the hidden states after the encoder layers of this stage, or `values` if it has none."""
        if "encoder" not in self.layers_by_stack:
            return values, {}
        inputs = _inputs(values[0], batch)
        ran = self.model.runner("encoder").run(inputs, NO_EXTRA_OUTPUTS, unpads=self.model.unpads)
        return [ran.hidden], ran.auxiliary_losses

    def _target(self, values: Sequence[Tensor], batch: dict[str, Tensor]) -> ModelInputs:
        """Return the inputs of the decoder layers of this stage."""
        if not self.reads_source:
            return _inputs(values[0], batch)
        own = {name: value for name, value in batch.items() if name in TARGET_ENTRIES}
        if len(values) > 1:
            own = {**_without(own, {"decoder_input_ids"}), "decoder_inputs_embeds": values[1]}
        target = DecoderInputs(**own).as_inputs()
        if target.input_ids is not None:
            return target
        shifted = self.model.shifted_right(batch.get("labels"), None)
        return dataclasses.replace(target, input_ids=shifted)


def _as_model_input(x: Tensor) -> dict[str, Tensor]:
    return {"inputs_embeds" if x.is_floating_point() else "input_ids": x}


def _inputs(x: Tensor, batch: dict[str, Tensor]) -> ModelInputs:
    return ModelInputs(
        **_as_model_input(x), **{name: batch[name] for name in SOURCE_ENTRIES & batch.keys()}
    ).with_placeholder_ids()


def _without(batch: dict[str, Tensor], names: set[str]) -> dict[str, Tensor]:
    return {name: value for name, value in batch.items() if name not in names}


def _state(source: Tensor, batch: dict[str, Tensor]) -> ModelState:
    """Return the state of a decoder that has read the source [B, S, E] and no token of the target."""
    tokens = NO_TOKENS.extended(_inputs(source, batch))
    return ModelState(NO_TOKENS, (), source, tokens.valid, tokens.length, source_pos=tokens.pos)


class _WithLoss(torch.autograd.Function):
    """The identity on `hidden`; the backward pass adds `share` times the gradients of the scalar `loss`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, loss: Tensor, share: float) -> Tensor:
        """Return hidden."""
        ctx.share, ctx.loss = share, loss.new_ones(())
        return hidden.clone()  # not a view, because `fully_shard` cannot track in-place changes behind it

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of hidden and of loss."""
        return grad, ctx.loss * ctx.share, None


TensorSlot = tuple[dict[str, Any], str]
"""The position of a tensor: the parameters or the buffers of a module, and its name there."""


class ParameterOwners:
    """The ranks that will hold each parameter and buffer of `model`, which is still complete.

    layers: for each rank of `group`, its ranges of layers.
    """

    def __init__(self, model: Transformer, layers: list[list[range]], group: dist.ProcessGroup):
        self.model, self.group, self.rank = model, group, dist.get_rank(group)
        self.dropped: list[tuple[nn.Module, str, nn.Module]] = []
        self.source: dict[int, int] = {}  # rank of each tensor of the rejoined model, by its id
        held = [{id(tensor) for tensor in _tensors(modules_of_layers(model, own))} for own in layers]
        uses: dict[int, list[TensorSlot]] = {}
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is not None:
                        uses.setdefault(id(tensor), []).append((table, name))
        ranks = range(len(layers))
        self.owned = [(use, tuple(rank for rank in ranks if key in held[rank])) for key, use in uses.items()]

    def current(self) -> Iterable[tuple[Tensor, tuple[int, ...]]]:
        """Return the current (maybe sharded) tensors with their ranks; no ranks if unused."""
        return ((table[name], ranks) for ((table, name), *_), ranks in self.owned)

    def remove_unowned(self) -> None:
        """Remove the tensors that this rank does not hold from the model, and free their memory."""
        gone: set[int] = set()
        for uses, ranks in self.owned:
            if ranks and self.rank not in ranks:
                table, name = uses[0]
                _replace(uses, torch.empty(table[name].shape, dtype=table[name].dtype, device="meta"))
                gone.add(id(table[name]))
        for parent, child in module_slots(self.model):
            module = getattr(parent, child)
            if module is not None and any(id(tensor) in gone for tensor in _tensors([module])):
                self.dropped.append((parent, child, module))
                setattr(parent, child, Placeholder())

    def restore_modules(self) -> None:
        """Restore the removed modules without their values, which `fetch` gets."""
        for parent, child, module in self.dropped:
            setattr(parent, child, module)
        self.dropped = []
        self.source = {id(tensor): next(iter(ranks), 0) for tensor, ranks in self.current()}

    def fetch(self, tensor: Tensor) -> Tensor | None:
        """Return a whole tensor of the rejoined model in the first of all processes, None in the others.

        Collective: every process calls it, for all tensors in the same order.
        """
        source = self.source[id(tensor)]
        whole = full_tensor(tensor) if self.rank == source else None
        if dist.get_process_group_ranks(self.group)[0] != 0:
            return None  # a replica, or the other shards of the same tensors
        if source == 0:
            return whole
        if whole is not None:
            dist.send(whole.contiguous(), group=self.group, group_dst=0)
        if self.rank:
            return None
        received = torch.empty_like(tensor, device=self.device)
        dist.recv(received, group=self.group, group_src=source)
        return received

    @property
    def device(self) -> torch.device:
        """Return the device of the tensors of this rank."""
        own = (tensor for tensor in _tensors([self.model]) if not tensor.is_meta)
        return next(own).device


def _replace(uses: list[TensorSlot], tensor: Tensor) -> None:
    """Set `tensor` at every position in `uses`, as a parameter if the previous value is a parameter."""
    table, name = uses[0]
    before = table[name]
    new = nn.Parameter(tensor, before.requires_grad) if isinstance(before, nn.Parameter) else tensor
    for table, name in uses:
        table[name] = new


def _tensors(modules: Iterable[nn.Module]) -> Iterable[Tensor]:
    return itertools.chain.from_iterable((*module.parameters(), *module.buffers()) for module in modules)
