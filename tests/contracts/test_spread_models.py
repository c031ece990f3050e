"""Models over sequences that are spread over processes: losses and gradients of one process."""

import torch
import torch.distributed as dist
from members import VOCAB, Case, assert_same, bases, gradients, shrunk, with_part
from selection import SINGLE, cases

from launching import launch, run_checks
from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.mechanisms.linear.feature_attention import PerformerConfig
from polyformer.attention.patterns import Aligned, Global, Window
from polyformer.attention.positions import AlibiConfig, EtcLabelsConfig
from polyformer.core.errors import InputError
from polyformer.core.sequence.context_parallel import context_parallel
from polyformer.models.architectures import Transformer
from polyformer.nn.feedforward import ExpertsConfig
from registered import EVERYTHING

REFUSED = {
    "Depth-act",
    "Depth-exits",
    "FeedForward-separable_convolution",
    "Head-choose",
    "Head-classify",
    "Head-classify_image",
    "Head-distilled",
    "Head-embed",
    "Head-embed_attended",
    "Head-embed_image",
    "Head-embed_projected",
    "Head-enhanced_masked",
    "Head-pretraining",
    "Head-semiparametric",
    "Head-span",
    "Memory-compressive",
    "Memory-memorizing",
    "Memory-recurrent",
    "Memory-sinks",
    "Norm-batch",
    # Later examples have an extension that depends on the length of a text.
    *(["Position-rope"] if EVERYTHING else []),
}
"""What asks for more tokens than a process has. Everything else computes what a process alone does."""


def all_parts() -> None:
    """A model around every member of the families; those that cannot say so, by their names."""
    refused = set()
    for case in cases("spread", shape=SINGLE):
        name = case.member.rpartition("-")[0]
        if refuses(case):
            refused.add(name)
        else:
            check(case)
    assert refused == REFUSED, refused ^ REFUSED


def refuses(case: Case) -> bool:
    """Before anything is exchanged, in all processes."""
    with context_parallel():
        try:
            case.model()(**case.labels(case.batch()))
        except InputError as error:
            return "context parallelism" in str(error)
    return False


def check(
    case: Case, length: int = 11, way: str = "auto", trained: bool = False, **inputs: torch.Tensor
) -> None:
    model = without_dropout(case.model().train(trained))
    batch = case.labels(case.batch(length=length)) | inputs
    whole = model(**batch)
    expected = gradients(model, whole.loss)
    with context_parallel(strategy=way):
        output = model(**batch)
    slots = output.slots
    assert slots is not None
    assert_same(output.loss, whole.loss)
    assert_same(output.last_hidden_state, whole.last_hidden_state[:, slots])
    assert_same(output.logits, whole.logits[:, slots])
    # Of parameters that the model concatenates they are columns, which cannot be exchanged.
    mean = {name: gradient.contiguous() for name, gradient in gradients(model, output.loss).items()}
    for gradient in mean.values():
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    assert_same(mean, expected)


def documents_and_padding() -> None:
    """A label is never across a document's end, nor lost where one process's tokens end."""
    documents = (torch.arange(29) // 6).expand(2, -1)
    mask = torch.ones(2, 29, dtype=torch.long)
    mask[0, 22:] = 0
    for part in (SoftmaxConfig(pattern=Window(5, 0) | Global(1)), PerformerConfig(features=6)):
        config = shrunk(with_part(bases()["decoder"], part))
        for inputs in ({"document_ids": documents}, {"attention_mask": mask}):
            labels = torch.randint(VOCAB, (2, 29), generator=torch.Generator().manual_seed(3))
            labels[:, :15] = -100  # some processes have no label
            check(Case("tiny", config), 29, labels=labels, **inputs)


def segments() -> None:
    """Labels of global and long tokens, whose sentences other processes may have."""
    part = with_part(bases()["encoder"], EtcLabelsConfig(global_tokens=2, max_distance=3))
    config = shrunk(with_part(part, SoftmaxConfig(pattern=Window(4) | Global(2))))
    check(Case("tiny", config), 29, segment_ids=(torch.arange(29) // 5).expand(2, -1))


def sources() -> None:
    """Encoder-decoders, whose target and source are both shared, by every way that keys get to queries."""
    short = torch.ones(2, 29, dtype=torch.long)
    short[0, 9:] = 0
    windows = SoftmaxConfig(pattern=Window(3))
    for part, way in (
        (SoftmaxConfig(), "ring"),
        (SoftmaxConfig(), "all"),
        (windows, "needed"),
        (SoftmaxConfig(pattern=Aligned(1.0, 4, 2)), "needed"),
        (PerformerConfig(features=6), "auto"),
    ):
        case = Case("tiny", shrunk(with_part(bases()["pair"], part)))
        check(case, 29, way, attention_mask=short)
        check(case, dist.get_world_size() + 2, way)  # of a target so short that some have none of it


def experts() -> None:
    """Their balance and the room that they have are of all tokens, wherever these are."""
    documents = (torch.arange(29) // 9).expand(2, -1)
    mask = torch.ones(2, 29, dtype=torch.long)
    mask[0, 20:] = 0
    part = ExpertsConfig(experts=3, capacity=0.7, balance=0.1)
    for shape, inputs in (("decoder", {"document_ids": documents}), ("encoder", {"attention_mask": mask})):
        check(Case("tiny", shrunk(with_part(bases()[shape], part))), 29, trained=True, **inputs)


def recomputed_and_trained() -> None:
    """Activations that are computed again exchange keys again; in training too."""
    torch.manual_seed(0)
    config = with_part(with_part(bases()["decoder"], AlibiConfig()), SoftmaxConfig(pattern=Window(4, 0)))
    model = Transformer(shrunk(config)).double()
    assert model.decoder is not None
    ids = torch.randint(VOCAB, (2, 13))
    results = []
    for recompute in (False, True):
        model.decoder.recompute = recompute
        with context_parallel():
            results.append(gradients(without_dropout(model.train()), model(ids, labels=ids).loss))
    assert_same(*results)


def without_dropout(model: Transformer) -> Transformer:
    """Which would draw other places in each process."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


CHECKS = {
    2: (all_parts, documents_and_padding, segments, recomputed_and_trained),
    4: (documents_and_padding, sources, experts),
}


def test_processes_compute_what_one_does():
    launch(__file__)


if __name__ == "__main__":
    run_checks(CHECKS)
