"""Code for the page of a member: a small model with the member. A test runs every snippet."""

import dataclasses
from typing import Any

from polyformer.attention.patterns.base import Pattern
from polyformer.attention.patterns.between_sequences import SourcePattern
from polyformer.cli.documentation import Member
from polyformer.core.config import Config

AXES = {
    "Block": ("decoder-small", "block"),
    "Depth": ("decoder-small", "depth"),
    "Drafting": ("decoder-small", "drafting"),
    "FeedForward": ("decoder-small", "feedforward"),
    "Memory": ("decoder-small", "memory"),
    "Norm": ("decoder-small", "norm"),
    "Position": ("decoder-small", "position"),
    "Mechanism": ("decoder-small", "attention"),
    "Head": ("encoder-small", "head"),
    "Pattern": ("encoder-small", "attention"),
}
"""The preset and the option that select a member of each axis."""

NESTED = {
    "ExitRule": ("depth", "exits(rule={})"),
    "RopeExtension": ("position", "rope(extension={})"),
}
"""Axes inside other axes: the option, and the notation of a member."""

CACHE = "CachePolicy"
"""The axis of an option of generation."""

SETTINGS = {"Task": "--task.kind", "Optimizer": "--optimizer.kind", "Schedule": "--schedule.kind"}
"""Axes of a recipe: the setting that selects a member."""

CALLS = {
    CACHE: "out = model.eval().generate(ids, cache={})",
    "Drafting": 'out = model.eval().generate(ids, draft="self")',
    "Head": "hidden = model(ids).last_hidden_state  # model(ids).logits is the output of the head",
    "Memory": "out = model(ids, state=model.new_state())  # the next segment: model(more, state=out.state)",
}


def expression(value: Any) -> str:
    """Return a configuration as written in files and on the command line, without default values."""
    if isinstance(value, Config):
        options = [
            f"{field.name}={expression(getattr(value, field.name))}"
            for field in dataclasses.fields(value)
            if getattr(value, field.name) != _default(field)
        ]
        return f"{value.kind}({', '.join(options)})" if options else str(value.kind)
    if hasattr(value, "to_text"):
        return value.to_text()
    if isinstance(value, tuple | list):
        return f"[{', '.join(expression(item) for item in value)}]"
    return repr(value)


def _default(field: dataclasses.Field) -> Any:
    return field.default_factory() if callable(field.default_factory) else field.default


def member_text(member: Member) -> str:
    """Return the member as users write it, with the options of its smallest example if it needs any."""
    if issubclass(member.cls, Pattern):
        return member.cls.picture()[0].to_text()
    try:
        config = member.cls()
    except (TypeError, ValueError):
        config = member.cls.examples()[0]
    return expression(config)


def python(member: Member) -> str | None:
    """Return Python code that creates and calls a model with the member; None for training members."""
    text = member_text(member)
    if member.axis in NESTED:
        override, frame = NESTED[member.axis]
        preset, text = "decoder-small", frame.format(text)
    elif member.axis == CACHE:
        preset, override = "decoder-small", "position"
    elif member.axis in AXES:
        preset, override = AXES[member.axis]
    else:
        return None
    if member.axis == "Mechanism" and not getattr(member.cls, "causal", True):
        preset = "encoder-small"
    call = CALLS.get(member.axis, "out = model(ids)")
    if member.axis == CACHE:
        call, text = call.format(f'"{text}"'), "rope"
    if issubclass(member.cls, SourcePattern):
        preset, override = "transformer-small", "cross_attention"
        call = "out = model(ids, decoder_input_ids=ids)"
        if member.name == "SourceSpans":
            call = (
                "spans = torch.arange(48).view(1, 48, 1) + torch.tensor([-2, 2])  # [batch, target, 2]\n"
                "out = model(ids, decoder_input_ids=ids, source_spans=spans)"
            )
    quoted = f"'{text}'" if '"' in text else f'"{text}"'
    quoted += ', position="rope"' if member.axis == "Memory" else ""  # a memory reads endless texts
    return "\n".join(
        [
            "import torch",
            "import polyformer",
            "",
            f'model = polyformer.create_model("{preset}", {override}={quoted})',
            "ids = torch.randint(0, 1000, (1, 48))  # [batch, tokens]",
            call,
        ]
    )


def shell(member: Member) -> str:
    """Return the command that uses the member."""
    text = member_text(member)
    if member.axis in NESTED:
        override, frame = NESTED[member.axis]
        return f'polyformer train --model.{override} "{frame.format(text)}"'
    if member.axis == CACHE:
        return f'polyformer generate RUN --cache "{text}" --prompt TEXT'
    if member.axis in SETTINGS:
        return f"polyformer train --data PATH {SETTINGS[member.axis]} {member.name}"
    if member.axis == "Pattern":
        return f'polyformer show pattern "{text}"'
    if member.axis in AXES:
        return f'polyformer train --model.{AXES[member.axis][1]} "{text}"'
    return "polyformer list " + member.axis.lower()
