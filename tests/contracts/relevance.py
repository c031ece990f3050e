"""Which contract concerns which kinds of member, and why: a test exists where its assertion can fail.

A kind is a family of a model's configuration, a pattern, a preset, or a variant: an option of no member. For
each contract the table names the kinds it concerns, with the reason, and in how many shapes of model
(decoder, encoder, pair: the first that can hold the member) it runs by day, with the first example of each
member. At night it runs with all examples in all shapes. What it says of a kind holds for all members, those
of users too. Of presets it takes as few as show every option that no other case of the contract shows.
"""

import dataclasses

from registered import EVERYTHING


@dataclasses.dataclass(frozen=True)
class Concern:
    """Kinds that a contract concerns, and why."""

    kinds: str
    why: str
    shapes: int = 1

    def __contains__(self, kind: str) -> bool:
        return kind in self.kinds.split()

    def takes(self, shape: int) -> bool:
        """Whether it asks for a member in a shape of model, a number from 0."""
        return EVERYTHING or shape < self.shapes


@dataclasses.dataclass(frozen=True)
class Contract:
    """The kinds it concerns, and why it does not concern the rest."""

    concerns: tuple[Concern, ...]
    rest: str

    def concern(self, kind: str) -> Concern | None:
        """What it asks of a kind, if it concerns it."""
        return next((concern for concern in self.concerns if kind in concern), None)


def contract(*concerns: Concern, rest: str = "") -> Contract:
    return Contract(concerns, rest)


OPTIONS = Concern("Preset", "sets options together")
TABLES = "embeds tokens and shares projections in its own way"
CACHED = "its layout is cut to the queries of a chunk"
KEPT = "what it keeps of earlier tokens is its own"
PRESETS = "presets: their parts are members, and what they set together has the contracts above"
NO_TENSORS = "a pattern has neither parameters nor buffers"
SAME_BOTH_WAYS = "it is the same code on both sides of the comparison"

RELEVANCE: dict[str, Contract] = {
    # K1: the fast form is the definition.
    "definition": contract(
        Concern("Mechanism", "its fast form is code of its own", 3),
        Concern("Position", "its terms reach the backends in forms of their own", 2),
        Concern("Memory", "there are more keys than queries"),
        Concern("Pattern Depth Block", "calls the mechanism in its own way"),
        OPTIONS,
        Concern("Variant", "shares or doubles projections", 3),
        rest=f"heads, norms and feed-forwards: {SAME_BOTH_WAYS}",
    ),
    "backends": contract(
        Concern("Position", "what it adds to scores is computed by each backend", 2),
        Concern("Pattern", "is the mask that each backend computes"),
        Concern("Memory", "there are more keys than queries"),
        OPTIONS,
        Concern("Variant", "groups heads, or has projections for global tokens", 2),
        rest="softmax attention alone has backends; what is outside it is the same in all",
    ),
    "mechanism": contract(
        Concern("Mechanism", "is called alone"),
        Concern("Pattern", "is softmax attention, whose backends have a contract of their own"),
        rest="is no mechanism",
    ),
    # K2 to K4: no future, no padding, no other documents.
    "future": contract(
        Concern("Mechanism FeedForward Block", "mixes tokens, or takes the order in which they come", 2),
        Concern("Position Pattern Memory Depth", "decides what a token meets"),
        Concern("Head", "says something of each token"),
        Concern("Norm", "its statistics may be of many tokens"),
        OPTIONS,
        Concern("Variant", TABLES, 2),
    ),
    "past": contract(
        Concern("Mechanism FeedForward", "its backward pass mixes tokens too", 2),
        Concern("Position Pattern Memory Depth Block", "decides what a token meets"),
        Concern("Variant", TABLES, 2),
        rest="heads and norms: they mix no tokens, and the values are compared above",
    ),
    "padding": contract(
        Concern("Mechanism FeedForward", "mixes tokens", 3),
        Concern("Head", "pools over tokens, or averages a loss", 3),
        Concern("Position", "counts tokens from the first real one", 2),
        Concern("Norm Depth", "has statistics of tokens, or counts them", 2),
        Concern("Pattern Memory", "names keys by their slots"),
        Concern("Block", "adds what the parts make of padding", 2),
        OPTIONS,
        Concern("Variant", TABLES, 3),
    ),
    "target padding": contract(
        Concern("Mechanism FeedForward", "mixes tokens"),
        Concern("Position Block Norm Depth", "stands in the decoder of a pair"),
        Concern("Pattern", "may be between target and source"),
        Concern("Variant", TABLES),
        rest="heads: the hidden states are compared; memories: there are none in a pair",
    ),
    "lengths": contract(
        Concern("Mechanism FeedForward", "rows may share what they must not", 2),
        Concern("Position Pattern Norm Depth Memory", "rows have limits or statistics of their own"),
        Concern("Variant", TABLES),
        rest="blocks and heads mix no tokens of hidden states",
    ),
    "empty row": contract(
        Concern("Mechanism", "normalises weights that may all be zero", 3),
        Concern("FeedForward", "divides, counts or sorts"),
        Concern("Head", "pools over no token"),
        Concern("Position Pattern Norm Depth Memory Block", "gets what such a row is"),
        Concern("Variant", TABLES),
        rest=PRESETS,
    ),
    "documents": contract(
        Concern("Mechanism FeedForward", "mixes tokens", 2),
        Concern("Position", "starts again with a document"),
        Concern("Pattern Depth Memory", "names keys by their slots"),
        Concern("Norm Block", "gets the tokens of all documents"),
        Concern("Variant", TABLES, 2),
        rest="heads: the hidden states are compared",
    ),
    # K5: state.
    "split": contract(
        Concern("Mechanism FeedForward Block", KEPT, 2),
        Concern("Memory Depth", KEPT),
        Concern("Position", "goes on counting", 2),
        Concern("Pattern", CACHED),
        Concern("Norm", "its statistics may be of many tokens"),
        OPTIONS,
        Concern("Variant", TABLES, 2),
        rest="heads keep nothing: the hidden states are compared",
    ),
    "kept padding": contract(
        Concern("Mechanism FeedForward", KEPT, 2),
        Concern("Memory Depth", KEPT),
        Concern("Position", "goes on counting"),
        Concern("Pattern", CACHED),
        OPTIONS,
        Concern("Variant", TABLES),
        rest="blocks, norms and heads keep nothing",
    ),
    "state": contract(
        Concern("Mechanism", KEPT, 2),
        Concern("FeedForward Memory Depth", KEPT),
        Concern("Variant", TABLES, 2),
        rest="patterns and positions read what the cache and the tokens keep; the others keep nothing",
    ),
    # K7: the layout.
    "layout": contract(Concern("Pattern", "has a layout"), rest="has no layout"),
    # K8 and K9: training.
    "gradients": contract(
        Concern("Mechanism Position Memory Depth", "has parameters"),
        Concern("Head", "has a loss, and labels of its own", 3),
        Concern("Block Norm FeedForward", "has parameters", 2),
        OPTIONS,
        Concern("Variant", TABLES, 2),
        rest=NO_TENSORS,
    ),
    "second order": contract(
        Concern("Mechanism Position Memory Block", "may have a backward pass written by hand"),
        Concern(
            "Norm FeedForward Head Depth", "may have a backward pass written by hand, the same on both sides"
        ),
        Concern("Variant", TABLES),
        rest="patterns: their backends have a test of their own",
    ),
    "untouched": contract(
        Concern("Mechanism", "keeps what it draws or counts", 2),
        Concern("Position Memory Depth Norm FeedForward Block Head", "has parameters"),
        Concern("Variant", TABLES),
        rest=f"{NO_TENSORS}; a preset has no code",
    ),
    "repeats": contract(
        Concern("Mechanism Position FeedForward Depth", "may draw numbers in training"),
        Concern("Head Memory Norm Block", "drops, or has statistics"),
        Concern("Variant", TABLES),
        rest="a pattern draws from a seed of its own",
    ),
    "evaluation": contract(
        Concern("Mechanism Head Memory Depth FeedForward", "may draw numbers"),
        Concern("Position Pattern Norm Block", "may draw numbers"),
        Concern("Variant", TABLES),
        rest=PRESETS,
    ),
    "generation": contract(
        Concern("Head Memory Depth", "predicts, or keeps what is predicted"),
        Concern("Mechanism FeedForward", "may draw numbers a step"),
        Concern("Variant", TABLES),
        rest="is the same in evaluation",
    ),
    "dropout": contract(
        Concern("Block Depth", "places the dropout of a layer"),
        Concern("Mechanism FeedForward Memory Norm", "changes its statistics or draws in training"),
        Concern("Variant", TABLES),
        rest="the dropout of a stack does not pass through it",
    ),
    # K10: files.
    "text": contract(
        Concern(
            "Mechanism Position FeedForward Block Norm Head Memory Depth Pattern", "is written in a file"
        ),
        OPTIONS,
        Concern("Variant", "is written in a file"),
    ),
    "names": contract(
        Concern("Mechanism Position FeedForward Block Norm Head Memory Depth Pattern", "has options"),
        OPTIONS,
        Concern("Variant", "has options"),
    ),
    "own options": contract(
        Concern("Mechanism Position FeedForward Block Norm Head Memory Depth", "has options of its own"),
        rest="a pattern's are read from its text; presets and variants have none",
    ),
    "disk": contract(
        Concern("Mechanism Position FeedForward Block Norm Head Memory Depth", "has parameters or buffers"),
        OPTIONS,
        Concern("Variant", "shares parameters", 3),
        rest=NO_TENSORS,
    ),
    # K11 and models in the precisions that people use.
    "half mechanism": contract(
        Concern("Mechanism", "sums many numbers"),
        Concern("Pattern", "sums fewer of them than dense attention does"),
        rest="is no mechanism",
    ),
    "every precision": contract(
        Concern("Mechanism Position Norm FeedForward", "has sums, tables or statistics of its own"),
        rest="a single precision is enough",
    ),
    "precision": contract(
        Concern("Head Block Memory Depth", "compares or sums numbers"),
        Concern("Pattern", "hides what it hides by a number"),
        OPTIONS,
        Concern("Variant", TABLES, 2),
        rest="in every precision",
    ),
    "precise mechanism": contract(
        Concern("Mechanism", "sums many numbers"), rest="a single precision is enough"
    ),
    "precise rest": contract(
        Concern("FeedForward", "mixes tokens"),
        Concern("Pattern Memory Depth", "hides what it hides by a number"),
        Concern("Variant", TABLES),
        rest="mechanisms: in every precision; the others hide nothing by numbers",
    ),
    "precise generation": contract(
        Concern("Mechanism Head Memory Depth", "predicts, or keeps what is predicted"),
        Concern("Variant", TABLES),
        rest="is the same in one pass",
    ),
    # K12: graphs and the meta device.
    "graph": contract(
        Concern(
            "Memory Variant", "has the operations of all its examples, and changes positions or projections"
        ),
        rest="a preset has no code; the others are compiled together",
    ),
    "graph of several": contract(
        Concern("Mechanism Depth Position FeedForward Block Norm", "may read a tensor's numbers"),
        Concern("Pattern Head", "has the operations of all its examples"),
        rest="is compiled alone",
    ),
    "graph with limits": contract(Concern("Mechanism", "may read the limits"), rest="hands the limits on"),
    "meta": contract(
        Concern("Position Mechanism", "has tables and drawn numbers that it makes itself"),
        Concern("FeedForward Block Norm Head Memory Depth", "has parameters"),
        OPTIONS,
        Concern("Variant", TABLES),
        rest=NO_TENSORS,
    ),
    # K13: cost.
    "counts": contract(
        Concern("Mechanism Position FeedForward Block Norm Head Memory Depth Pattern Variant", "is counted"),
        rest="presets are counted at their full size",
    ),
    # K14: weights in int8.
    "int8": contract(
        Concern("FeedForward Head Memory", "has weights"),
        Concern("Mechanism Position Block Depth", "has weights, or reads those of a layer"),
        OPTIONS,
        Concern("Variant", "shares weights", 3),
        rest="patterns and norms have no matrix",
    ),
    "int8 disk": contract(
        Concern("FeedForward Head Memory Mechanism Position Depth", "has weights, or reads those of a layer"),
        Concern("Variant", "shares weights"),
        rest="patterns and norms have no matrix; a block has none of its own",
    ),
    "int8 decoding": contract(
        Concern("FeedForward Memory Mechanism Position Depth Block", "keeps what products of int8 gave"),
        Concern("Variant", "shares weights"),
        rest="keeps nothing",
    ),
    # K15: speculation.
    "speculation": contract(
        Concern("Mechanism FeedForward Memory Depth", "takes tokens back"),
        Concern("Head", "predicts the next token"),
        Concern("Position Pattern Block", "sees the tokens that are taken back"),
        Concern("Variant", TABLES, 2),
        rest="norms see a token at a time",
    ),
    # Nothing at all.
    "empty batch": contract(
        Concern("Mechanism FeedForward", "sorts, or cuts into blocks"),
        Concern("Head", "pools, or averages a loss", 2),
        Concern("Position Norm Depth Memory Block", "counts or averages"),
        OPTIONS,
        Concern("Variant", TABLES, 2),
        rest="patterns: as mechanisms of their own",
    ),
    "empty decoding": contract(
        Concern("Mechanism", KEPT, 2),
        Concern("FeedForward Memory Depth", KEPT),
        Concern("Position", "goes on counting"),
        Concern("Variant", TABLES, 2),
        rest="keeps nothing",
    ),
    "refusal": contract(Concern("Mechanism", "checks the widths it gets"), rest="is handed what was checked"),
    # Sequences over processes: a decoder's layers have the parts of an encoder's.
    "spread": contract(
        Concern("Position Head", "reads tokens that other processes have", 2),
        Concern("Block FeedForward Norm Memory Depth", "may ask for tokens that other processes have"),
        rest="mechanisms and patterns have tests of their own",
    ),
}
