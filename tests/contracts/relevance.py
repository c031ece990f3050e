"""Which contract concerns which kinds of member, and why: a test exists where its assertion can fail.

A kind is a family of a model's configuration, a pattern, a preset, or a variant: an option of no member. For
each contract the table names the kinds it concerns, with the reason, how many of a member's examples it takes
(the first, or every one) and in how many shapes of model (decoder, encoder, pair: the first that can hold the
member). What it says of a kind holds for all members, those of users too. Of presets it takes as few as show
every option that no other case of the contract shows.
"""

import dataclasses

from registered import EVERYTHING


@dataclasses.dataclass(frozen=True)
class Concern:
    """Kinds that a contract concerns, and why."""

    kinds: str
    why: str
    every: bool = False
    shapes: int = 1

    def __contains__(self, kind: str) -> bool:
        return kind in self.kinds.split()

    def takes(self, example: int, shape: int = 0) -> bool:
        """Whether it asks for an example of a member, in a shape of model: numbers from 0."""
        return EVERYTHING or ((self.every or not example) and shape < self.shapes)


@dataclasses.dataclass(frozen=True)
class Contract:
    """The kinds it concerns, and why it does not concern the rest."""

    concerns: tuple[Concern, ...]
    rest: str

    def concern(self, kind: str) -> Concern | None:
        """What it asks of a kind, if it concerns it."""
        return next((concern for concern in self.concerns if kind in concern), None)


def first(kinds: str, why: str, shapes: int = 1) -> Concern:
    return Concern(kinds, why, False, shapes)


def every(kinds: str, why: str, shapes: int = 1) -> Concern:
    return Concern(kinds, why, True, shapes)


def contract(*concerns: Concern, rest: str = "") -> Contract:
    return Contract(concerns, rest)


OPTIONS = first("Preset", "sets options together")
TABLES = "embeds tokens and shares projections in its own way"
CACHED = "its layout is cut to the queries of a chunk"
KEPT = "what it keeps of earlier tokens is its own"
PRESETS = "presets: their parts are members, and what they set together has the contracts above"
NO_TENSORS = "a pattern has neither parameters nor buffers"
SAME_BOTH_WAYS = "it is the same code on both sides of the comparison"

RELEVANCE: dict[str, Contract] = {
    # K1: the fast form is the definition.
    "definition": contract(
        every("Mechanism", "its fast form is code of its own", 3),
        every("Position", "its terms reach the backends in forms of their own", 2),
        every("Memory", "there are more keys than queries"),
        first("Pattern Depth Block", "calls the mechanism in its own way"),
        OPTIONS,
        first("Variant", "shares or doubles projections", 3),
        rest=f"heads, norms and feed-forwards: {SAME_BOTH_WAYS}",
    ),
    "backends": contract(
        every("Position", "what it adds to scores is computed by each backend", 2),
        every("Pattern", "is the mask that each backend computes"),
        first("Memory", "there are more keys than queries"),
        OPTIONS,
        first("Variant", "groups heads, or has projections for global tokens", 2),
        rest="softmax attention alone has backends; what is outside it is the same in all",
    ),
    "mechanism": contract(
        every("Mechanism", "is called alone"),
        first("Pattern", "is softmax attention, whose backends have a contract of their own"),
        rest="is no mechanism",
    ),
    # K2 to K4: no future, no padding, no other documents.
    "future": contract(
        every("Mechanism FeedForward Block", "mixes tokens, or takes the order in which they come", 2),
        every("Position Pattern Memory Depth", "decides what a token meets"),
        every("Head", "says something of each token"),
        first("Norm", "its statistics may be of many tokens"),
        OPTIONS,
        first("Variant", TABLES, 2),
    ),
    "past": contract(
        every("Mechanism FeedForward", "its backward pass mixes tokens too", 2),
        first("Position Pattern Memory Depth Block", "decides what a token meets"),
        first("Variant", TABLES, 2),
        rest="heads and norms: they mix no tokens, and the values are compared above",
    ),
    "padding": contract(
        every("Mechanism FeedForward", "mixes tokens", 3),
        every("Head", "pools over tokens, or averages a loss", 3),
        every("Position", "counts tokens from the first real one", 2),
        every("Norm Depth", "has statistics of tokens, or counts them", 2),
        every("Pattern Memory", "names keys by their slots"),
        first("Block", "adds what the parts make of padding", 2),
        OPTIONS,
        first("Variant", TABLES, 3),
    ),
    "target padding": contract(
        every("Mechanism FeedForward", "mixes tokens"),
        first("Position Block Norm Depth", "stands in the decoder of a pair"),
        first("Pattern", "may be between target and source"),
        first("Variant", TABLES),
        rest="heads: the hidden states are compared; memories: there are none in a pair",
    ),
    "lengths": contract(
        every("Mechanism FeedForward", "rows may share what they must not", 2),
        first("Position Pattern Norm Depth Memory", "rows have limits or statistics of their own"),
        first("Variant", TABLES),
        rest="blocks and heads mix no tokens of hidden states",
    ),
    "empty row": contract(
        every("Mechanism", "normalises weights that may all be zero", 3),
        every("FeedForward", "divides, counts or sorts"),
        every("Head", "pools over no token"),
        first("Position Pattern Norm Depth Memory Block", "gets what such a row is"),
        first("Variant", TABLES),
        rest=PRESETS,
    ),
    "documents": contract(
        every("Mechanism FeedForward", "mixes tokens", 2),
        every("Position", "starts again with a document"),
        every("Pattern Depth Memory", "names keys by their slots"),
        first("Norm Block", "gets the tokens of all documents"),
        first("Variant", TABLES, 2),
        rest="heads: the hidden states are compared",
    ),
    # K5: state.
    "split": contract(
        every("Mechanism FeedForward Block", KEPT, 2),
        every("Memory Depth", KEPT),
        every("Position", "goes on counting", 2),
        every("Pattern", CACHED),
        first("Norm", "its statistics may be of many tokens"),
        OPTIONS,
        first("Variant", TABLES, 2),
        rest="heads keep nothing: the hidden states are compared",
    ),
    "kept padding": contract(
        every("Mechanism FeedForward", KEPT, 2),
        every("Memory Depth", KEPT),
        every("Position", "goes on counting"),
        first("Pattern", CACHED),
        OPTIONS,
        first("Variant", TABLES),
        rest="blocks, norms and heads keep nothing",
    ),
    "state": contract(
        every("Mechanism", KEPT, 2),
        every("FeedForward Memory Depth", KEPT),
        first("Variant", TABLES, 2),
        rest="patterns and positions read what the cache and the tokens keep; the others keep nothing",
    ),
    # K7: the layout.
    "layout": contract(every("Pattern", "has a layout"), rest="has no layout"),
    # K8 and K9: training.
    "gradients": contract(
        every("Mechanism Position Memory Depth", "has parameters"),
        every("Head", "has a loss, and labels of its own", 3),
        every("Block Norm FeedForward", "has parameters", 2),
        OPTIONS,
        first("Variant", TABLES, 2),
        rest=NO_TENSORS,
    ),
    "second order": contract(
        every("Mechanism Position Memory Block", "may have a backward pass written by hand"),
        first(
            "Norm FeedForward Head Depth", "may have a backward pass written by hand, the same on both sides"
        ),
        first("Variant", TABLES),
        rest="patterns: their backends have a test of their own",
    ),
    "untouched": contract(
        every("Mechanism", "keeps what it draws or counts", 2),
        first("Position Memory Depth Norm FeedForward Block Head", "has parameters"),
        first("Variant", TABLES),
        rest=f"{NO_TENSORS}; a preset has no code",
    ),
    "repeats": contract(
        every("Mechanism Position FeedForward Depth", "may draw numbers in training"),
        first("Head Memory Norm Block", "drops, or has statistics"),
        first("Variant", TABLES),
        rest="a pattern draws from a seed of its own",
    ),
    "evaluation": contract(
        every("Mechanism Head Memory Depth FeedForward", "may draw numbers"),
        first("Position Pattern Norm Block", "may draw numbers"),
        first("Variant", TABLES),
        rest=PRESETS,
    ),
    "generation": contract(
        every("Head Memory Depth", "predicts, or keeps what is predicted"),
        first("Mechanism FeedForward", "may draw numbers a step"),
        first("Variant", TABLES),
        rest="is the same in evaluation",
    ),
    "dropout": contract(
        every("Block Depth", "places the dropout of a layer"),
        first("Mechanism FeedForward Memory Norm", "changes its statistics or draws in training"),
        first("Variant", TABLES),
        rest="the dropout of a stack does not pass through it",
    ),
    # K10: files.
    "text": contract(
        every("Mechanism Position FeedForward Block Norm Head Memory Depth Pattern", "is written in a file"),
        OPTIONS,
        first("Variant", "is written in a file"),
    ),
    "names": contract(
        first("Mechanism Position FeedForward Block Norm Head Memory Depth Pattern", "has options"),
        OPTIONS,
        first("Variant", "has options"),
    ),
    "own options": contract(
        first("Mechanism Position FeedForward Block Norm Head Memory Depth", "has options of its own"),
        rest="a pattern's are read from its text; presets and variants have none",
    ),
    "disk": contract(
        every("Mechanism Position FeedForward Block Norm Head Memory Depth", "has parameters or buffers"),
        OPTIONS,
        first("Variant", "shares parameters", 3),
        rest=NO_TENSORS,
    ),
    # K11 and models in the precisions that people use.
    "half mechanism": contract(
        every("Mechanism", "sums many numbers"),
        first("Pattern", "sums fewer of them than dense attention does"),
        rest="is no mechanism",
    ),
    "every precision": contract(
        every("Mechanism Position Norm FeedForward", "has sums, tables or statistics of its own"),
        rest="a single precision is enough",
    ),
    "precision": contract(
        every("Head Block Memory Depth", "compares or sums numbers"),
        first("Pattern", "hides what it hides by a number"),
        OPTIONS,
        first("Variant", TABLES, 2),
        rest="in every precision",
    ),
    "precise mechanism": contract(
        every("Mechanism", "sums many numbers"), rest="a single precision is enough"
    ),
    "precise rest": contract(
        every("FeedForward", "mixes tokens"),
        first("Pattern Memory Depth", "hides what it hides by a number"),
        first("Variant", TABLES),
        rest="mechanisms: in every precision; the others hide nothing by numbers",
    ),
    "precise generation": contract(
        first("Mechanism Head Memory Depth", "predicts, or keeps what is predicted"),
        first("Variant", TABLES),
        rest="is the same in one pass",
    ),
    # K12: graphs and the meta device.
    "graph": contract(
        first(
            "Memory Variant", "has the operations of all its examples, and changes positions or projections"
        ),
        rest="a preset has no code; the others are compiled together",
    ),
    "graph of several": contract(
        every("Mechanism Depth Position FeedForward Block Norm", "may read a tensor's numbers"),
        first("Pattern Head", "has the operations of all its examples"),
        rest="is compiled alone",
    ),
    "graph with limits": contract(first("Mechanism", "may read the limits"), rest="hands the limits on"),
    "meta": contract(
        every("Position Mechanism", "has tables and drawn numbers that it makes itself"),
        first("FeedForward Block Norm Head Memory Depth", "has parameters"),
        OPTIONS,
        first("Variant", TABLES),
        rest=NO_TENSORS,
    ),
    # K13: cost.
    "counts": contract(
        first("Mechanism Position FeedForward Block Norm Head Memory Depth Pattern Variant", "is counted"),
        rest="presets are counted at their full size",
    ),
    # K14: weights in int8.
    "int8": contract(
        every("FeedForward Head Memory", "has weights"),
        first("Mechanism Position Block Depth", "has weights, or reads those of a layer"),
        OPTIONS,
        first("Variant", "shares weights", 3),
        rest="patterns and norms have no matrix",
    ),
    "int8 disk": contract(
        first("FeedForward Head Memory Mechanism Position Depth", "has weights, or reads those of a layer"),
        first("Variant", "shares weights"),
        rest="patterns and norms have no matrix; a block has none of its own",
    ),
    "int8 decoding": contract(
        first("FeedForward Memory Mechanism Position Depth Block", "keeps what products of int8 gave"),
        first("Variant", "shares weights"),
        rest="keeps nothing",
    ),
    # K15: speculation.
    "speculation": contract(
        every("Mechanism FeedForward Memory Depth", "takes tokens back"),
        every("Head", "predicts the next token"),
        first("Position Pattern Block", "sees the tokens that are taken back"),
        first("Variant", TABLES, 2),
        rest="norms see a token at a time",
    ),
    # Nothing at all.
    "empty batch": contract(
        every("Mechanism FeedForward", "sorts, or cuts into blocks"),
        every("Head", "pools, or averages a loss", 2),
        first("Position Norm Depth Memory Block", "counts or averages"),
        OPTIONS,
        first("Variant", TABLES, 2),
        rest="patterns: as mechanisms of their own",
    ),
    "empty decoding": contract(
        every("Mechanism", KEPT, 2),
        every("FeedForward Memory Depth", KEPT),
        first("Position", "goes on counting"),
        first("Variant", TABLES, 2),
        rest="keeps nothing",
    ),
    "refusal": contract(first("Mechanism", "checks the widths it gets"), rest="is handed what was checked"),
    # Sequences over processes: a decoder's layers have the parts of an encoder's.
    "spread": contract(
        every("Position Head", "reads tokens that other processes have", 2),
        every("Block FeedForward Norm Memory Depth", "may ask for tokens that other processes have"),
        rest="mechanisms and patterns have tests of their own",
    ),
}
