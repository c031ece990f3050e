"""What a mechanism declares that it cannot do is refused with a sentence that says what to use instead."""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import ClassVar

import pytest
import torch
from members import bases, shrunk, with_part
from selection import mechanisms, patterns

from polyformer.attention.mechanisms import PairWeights, SoftmaxConfig
from polyformer.attention.mechanisms.base import ALTERNATIVES, CAPABILITIES, MechanismConfig
from polyformer.attention.patterns.between_sequences import is_between_sequences
from polyformer.attention.positions import (
    AlibiConfig,
    NoPositionConfig,
    PositionConfig,
    RopeConfig,
    Shape,
)
from polyformer.attention.positions.rope_extensions import DynamicNtkConfig
from polyformer.core.errors import InputError
from polyformer.core.registry import in_package
from polyformer.core.sequence.context_parallel import ContextParallel, use_context_parallel
from polyformer.models.architectures import Transformer
from polyformer.models.config import ModelConfig
from polyformer.nn.memory import RecurrentConfig
from polyformer.nn.stack import StackConfig, build_stack
from registered import EVERYTHING


@pytest.fixture
def unable() -> Iterator[type[SoftmaxConfig]]:
    """A registered member that can do nothing of the list: the refusals are the library's, not a member's."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class UnableConfig(SoftmaxConfig):
        kind: ClassVar[str] = "unable"
        causal: ClassVar[bool] = False
        supports_packing: ClassVar[bool] = False
        supports_kv_cache: ClassVar[bool] = False
        supports_score_bias: ClassVar[bool] = False
        supports_part_rotations: ClassVar[bool] = False
        supports_recurrence: ClassVar[bool] = False
        supports_context_parallel: ClassVar[bool] = False
        instead: ClassVar[str] = "another thing"

    yield UnableConfig
    del MechanismConfig.kinds["unable"]


def refused(ability: str, part: MechanismConfig) -> None:
    """Asks for the ability, by the way that every user would."""
    with pytest.raises(InputError) as caught:
        use(ability, part)
    reason = f" ({part.reasons[ability]})" if ability in part.reasons else ""
    message = f"mechanism {part.kind!r} cannot {CAPABILITIES[ability]}{reason}; use {part.instead}"
    way = f"; or {ALTERNATIVES[ability]}" if ability in ALTERNATIVES else ""
    assert str(caught.value) == message + way


def use(ability: str, part: MechanismConfig) -> None:
    ids = torch.ones(1, 4, dtype=torch.long)
    if ability == "causal":
        shrunk(with_part(bases()["decoder"], part))
    elif ability == "supports_score_bias":
        Transformer(shrunk(with_part(with_part(bases()["encoder"], part), AlibiConfig())))
    elif ability == "supports_part_rotations":
        rope = RopeConfig(extension=DynamicNtkConfig(factor=2.0, original_max_positions=4))
        Transformer(shrunk(with_part(with_part(bases()["encoder"], part), rope)))
    elif ability == "supports_packing":
        Transformer(shrunk(with_part(bases()["encoder"], part)))(ids, document_ids=ids)
    elif ability == "supports_recurrence":
        use_memory(part)
    elif ability == "supports_context_parallel":
        with use_context_parallel(ContextParallel(None, 0, 1)):
            Transformer(shrunk(with_part(bases()["encoder"], part)))(ids)
    elif part.causal:
        Transformer(shrunk(with_part(bases()["decoder"], part)))(ids, use_cache=True)
    else:
        Transformer(shrunk(with_part(bases()["encoder"], part))).get_submodule("encoder").new_states(0)  # type: ignore[operator]


def use_memory(part: MechanismConfig) -> None:
    """Two segments in training; of what a decoder cannot be made of, the stack is built alone."""
    stack = StackConfig(position=NoPositionConfig(), memory=RecurrentConfig())
    if not part.causal:
        build_stack(with_part(stack, part), 24, 40)
        return
    model = Transformer(shrunk(with_part(ModelConfig(vocab_size=17, decoder=stack), part)))
    ids = torch.ones(1, 4, dtype=torch.long)
    state = model(ids, use_cache=True).state
    model(ids, state=state).last_hidden_state.sum().backward()


REFUSALS = {
    **{
        kind: {"supports_score_bias", "supports_recurrence"}
        for kind in ("delta", "gated_delta", "gla", "kda", "linear", "retention", "rwkv7", "ssd")
    },
    "gated_convolution": {"supports_score_bias", "supports_recurrence", "supports_context_parallel"},
    "cope": {"supports_context_parallel"},
    "cosine": {"supports_context_parallel"},
    "differential": {"supports_context_parallel"},
    "dynamic_span": {"supports_context_parallel"},
    "forgetting": {"supports_context_parallel"},
    "linformer": {
        "causal",
        "supports_packing",
        "supports_kv_cache",
        "supports_score_bias",
        "supports_recurrence",
    },
    "lsh": {"supports_recurrence", "supports_context_parallel"},
    "memory_compressed": {"supports_recurrence", "supports_context_parallel"},
    "moba": {"supports_recurrence", "supports_context_parallel"},
    "nsa": {"supports_score_bias", "supports_recurrence", "supports_context_parallel"},
    "performer": {"supports_score_bias", "supports_recurrence"},
    "persistent": {"supports_context_parallel"},
    "rfa": {"supports_score_bias", "supports_recurrence"},
    "routing": {"supports_recurrence", "supports_context_parallel"},
    "sinkhorn": {"supports_score_bias", "supports_recurrence", "supports_context_parallel"},
    "selective": {"supports_kv_cache", "supports_recurrence", "supports_context_parallel"},
    "sigmoid": {"supports_context_parallel"},
    "sort_cut": {
        "causal",
        "supports_kv_cache",
        "supports_score_bias",
        "supports_recurrence",
        "supports_context_parallel",
    },
    "svd": {
        "causal",
        "supports_packing",
        "supports_kv_cache",
        "supports_score_bias",
        "supports_recurrence",
        "supports_context_parallel",
    },
    "talking_heads": {"supports_context_parallel"},
    "top_blocks": {"supports_recurrence", "supports_context_parallel"},
}
"""All that mechanisms refuse. Contracts do not ask for these: they are generated for what a member can do."""

BIDIRECTIONAL = {
    "BlockDiffusion(size=3)",
    "BlockDiffusion(size=8)",
    "(Causal() | Whole(tokens=5))",
    "GlobalEnd(tokens=1)",
    "Prefix(tokens=5)",
    "Whole(tokens=100)",
}
"""The examples of patterns in which a token attends to later ones: softmax with them refuses a decoder."""


def test_all_refusals_are_listed():
    """A new one, or one fewer, is noticed here."""
    own = [
        part
        for name, part in mechanisms("mechanism")
        if name.startswith("Mechanism-") and in_package(type(part))
    ]
    refusals = {part.kind: refusals_of(part) for part in own}
    assert {kind: abilities for kind, abilities in refusals.items() if abilities} == REFUSALS
    for part in own:  # of all examples of a kind, the same
        assert refusals_of(part) == refusals[part.kind]
    assert {part.kind for part in own if part.supports_part_rotations} == {
        *("alternate", "cosine", "differential", "forgetting", "persistent", "softmax"),
    }
    own_patterns = {text: pattern for text, pattern in patterns() if in_package(type(pattern))}
    bidirectional = {text for text, pattern in own_patterns.items() if not pattern.causal()}
    assert bidirectional == BIDIRECTIONAL & own_patterns.keys()
    assert not EVERYTHING or bidirectional == BIDIRECTIONAL


def refusals_of(part: MechanismConfig) -> set[str]:
    """All but rotations of sets of pairs, which only softmax attention has."""
    return {
        ability
        for ability in CAPABILITIES
        if ability != "supports_part_rotations" and not getattr(part, ability)
    }


def test_positions_are_refused_where_keys_are_summed_or_projected():
    """Every mechanism with every scheme, in an encoder and, where it can, in a decoder: by their kinds."""
    shape = Shape(hidden_size=8, max_positions=9, num_heads=2, head_size=4)
    schemes = {kind: config for kind, config in PositionConfig.kinds.items() if in_package(config)}
    changing = {kind for kind, config in schemes.items() if config.examples()[0].build(shape).adds_terms}
    assert changing >= {"alibi", "da", "deberta", "shaw", "t5", "transformer_xl"}
    refused = Counter[str]()
    for _, part in mechanisms("mechanism"):
        for kind in changing if part.kind not in refused else ():
            refused[part.kind] += (1 + part.causal) * refuses(part, kind)
    assert {kind for kind, abilities in REFUSALS.items() if "supports_score_bias" in abilities} == (
        +refused
    ).keys()
    assert refused["performer"] == 2 * refused["svd"] == 2 * len(changing)


def refuses(part: MechanismConfig, scheme: str) -> bool:
    stack = StackConfig(position=PositionConfig.from_dict(scheme))
    try:
        build_stack(with_part(stack, part), 24, 40)
    except InputError as error:
        return CAPABILITIES["supports_score_bias"] in str(error)
    return False


@pytest.mark.parametrize(
    ("name", "part"), [each for each in mechanisms("mechanism") if not is_between_sequences(each[1])]
)
def test_a_member_does_what_it_declares_and_refuses_the_rest(name: str, part: MechanismConfig):
    for ability in CAPABILITIES:
        if getattr(part, ability):
            use(ability, part)
        else:
            refused(ability, part)


@pytest.mark.parametrize(
    "mechanism", ["performer", "rfa", {"kind": "alternate", "mechanisms": ["performer", "softmax"]}]
)
def test_attention_by_features_says_why_it_takes_no_distances(mechanism: object):
    reason = (
        r"cannot use a position scheme that changes the scores \(its keys are summed .* Fourier .*\); use"
    )
    with pytest.raises(InputError, match=reason):
        MechanismConfig.from_dict(mechanism).require("supports_score_bias")


@pytest.mark.parametrize("ability", list(CAPABILITIES))
def test_refusals_name_the_member_and_what_to_use(unable: type[SoftmaxConfig], ability: str):
    refused(ability, unable())


@pytest.fixture
def forgetful() -> Iterator[type[SoftmaxConfig]]:
    """A registered member that a decoder can be made of, but without a state."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class ForgetfulConfig(SoftmaxConfig):
        kind: ClassVar[str] = "forgetful"
        supports_kv_cache: ClassVar[bool] = False

    yield ForgetfulConfig
    del MechanismConfig.kinds["forgetful"]


def test_a_decoder_without_a_state_still_trains(forgetful: type[SoftmaxConfig]):
    """Only what is asked for is refused."""
    ids = torch.ones(1, 4, dtype=torch.long)
    pair = Transformer(shrunk(with_part(bases()["pair"], forgetful())))
    pair(ids, labels=ids).loss.backward()
    with pytest.raises(InputError, match="cannot continue from a KV cache"):
        pair(ids, decoder_input_ids=ids, use_cache=True)
    with pytest.raises(InputError, match="cannot continue from a KV cache"):
        pair.encode(ids)
    decoder = Transformer(shrunk(with_part(bases()["decoder"], forgetful())))
    decoder(ids, labels=ids).loss.backward()
    with pytest.raises(InputError, match="cannot continue from a KV cache"):
        decoder(ids, use_cache=True)


def test_a_file_with_such_a_decoder_is_refused(unable: type[SoftmaxConfig]):
    data = shrunk(bases()["decoder"]).to_dict()
    data["decoder"]["attention"]["mechanism"] = "unable"
    with pytest.raises(
        InputError, match="mechanism 'unable' cannot run in a decoder: it sees later tokens; use"
    ):
        ModelConfig.from_dict(data)


@pytest.mark.parametrize("ability", CAPABILITIES)
def test_a_capability_in_the_module_is_refused_because_nothing_would_read_it(ability: str):
    message = rf"Own\.{ability}: a model reads it from the configuration, .*; move the line `{ability} = "
    with pytest.raises(InputError, match=message):
        type("Own", (PairWeights,), {ability: False})
    assert not hasattr(PairWeights, ability)
