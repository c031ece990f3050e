"""The Transformer of "Attention Is All You Need" (Vaswani et al. 2017, arXiv:1706.03762), in plain PyTorch.

    python examples/plain_transformer.py [STEPS]

The file follows the paper from section 3 to section 6: the model, the data, the training, the search. In
less than a minute on two CPU cores it learns to translate short English sentences into German.

Shapes: B sentences, S source tokens, T target tokens, D = d_model, H heads, V words in the vocabulary.
"""

import math
import random
import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn

PAD, START, END = 0, 1, 2  # token ids
Pair = tuple[list[int], list[int]]  # token ids of a sentence and of its translation


# Section 3, figure 1. The encoder turns each source token into a vector that depends on the whole sentence.
# The decoder reads these vectors and writes the translation from left to right. There is no recurrence and no
# convolution: tokens exchange information only through attention, so training runs over all of them at once.
class Transformer(nn.Module):
    """The encoder-decoder. Its defaults are the base model of table 3."""

    def __init__(
        self,
        vocabulary: int,
        d_model: int = 512,
        layers: int = 6,
        heads: int = 8,
        d_ff: int = 2048,
        dropout: float = 0.1,
    ):
        super().__init__()
        self.embedding = Embedding(vocabulary, d_model, dropout)
        self.encoder = nn.ModuleList(EncoderLayer(d_model, heads, d_ff, dropout) for _ in range(layers))
        self.decoder = nn.ModuleList(DecoderLayer(d_model, heads, d_ff, dropout) for _ in range(layers))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return logits [B, T, V] for the word after each target token; source [B, S], target [B, T]."""
        return self.decode(target, self.encode(source), source)

    def encode(self, source: Tensor) -> Tensor:
        """Return the encoder's output [B, S, D], called memory below."""
        x = self.embedding(source)
        for layer in self.encoder:
            x = layer(x, not_padding(source))
        return x

    def decode(self, target: Tensor, memory: Tensor, source: Tensor) -> Tensor:
        """Return logits [B, T, V] for the word after each target token."""
        x = self.embedding(target)
        for layer in self.decoder:
            x = layer(x, causal(target), memory, not_padding(source))
        return self.embedding.logits(x)


# Section 3.1. Every sub-layer is wrapped: LayerNorm(x + Sublayer(x)). It only has to learn a correction of x,
# and gradients have a short path to the first layer. Section 5.4 adds dropout to the sub-layer's output.
class EncoderLayer(nn.Module):
    """Self-attention, then a feed-forward network: [B, S, D] -> [B, S, D]."""

    def __init__(self, d_model: int, heads: int, d_ff: int, dropout: float):
        super().__init__()
        self.attention = MultiHeadAttention(d_model, heads)
        self.feed_forward = feed_forward(d_model, d_ff)
        self.norms = nn.ModuleList(nn.LayerNorm(d_model) for _ in range(2))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        x = self.norms[0](x + self.dropout(self.attention(x, x, visible)))
        return self.norms[1](x + self.dropout(self.feed_forward(x)))


class DecoderLayer(nn.Module):
    """Self-attention, cross-attention to the source, then a feed-forward network: [B, T, D] -> [B, T, D]."""

    def __init__(self, d_model: int, heads: int, d_ff: int, dropout: float):
        super().__init__()
        self.attention = MultiHeadAttention(d_model, heads)
        self.cross_attention = MultiHeadAttention(d_model, heads)
        self.feed_forward = feed_forward(d_model, d_ff)
        self.norms = nn.ModuleList(nn.LayerNorm(d_model) for _ in range(3))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, visible: Tensor, memory: Tensor, memory_visible: Tensor) -> Tensor:
        x = self.norms[0](x + self.dropout(self.attention(x, x, visible)))
        x = self.norms[1](x + self.dropout(self.cross_attention(x, memory, memory_visible)))
        return self.norms[2](x + self.dropout(self.feed_forward(x)))


# Section 3.2.1. Each query is compared with every key. The output is an average of the values, weighted by
# how well their keys match. Two tokens at any distance are connected by a single step (section 4).
def attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Equation 1, softmax(q k^T / sqrt(d_k)) v: q [B, H, T, d_k], k and v [B, H, S, d_k] -> [B, H, T, d_k]"""
    # A sum of d_k products of variance 1 has variance d_k. Without the division, softmax would put almost all
    # weight on a single key, and its gradient would vanish.
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
    return weights @ v


# Section 3.2.2. A single average can look for only one thing. Several heads look for different things, each
# in a smaller space, at about the cost of one head in the full space. Each layer below serves all heads.
class MultiHeadAttention(nn.Module):
    """Concat(head_1, ..., head_H) W^O with head_i = attention(x W^Q_i, y W^K_i, y W^V_i)."""

    def __init__(self, d_model: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor, visible: Tensor) -> Tensor:
        """Return [B, T, D]: each token of x [B, T, D] reads the visible tokens of y [B, S, D]."""
        projected = self.query(x), self.key(y), self.value(y)
        q, k, v = (z.unflatten(2, (self.heads, -1)).transpose(1, 2) for z in projected)  # [B, H, T or S, d_k]
        return self.output(attention(q, k, v, visible).transpose(1, 2).flatten(2))


# Section 3.2.3. Attention has three uses, which differ in the tokens that are visible. The encoder and the
# cross-attention see all source tokens except padding. In the decoder a token sees only itself and earlier
# tokens: training predicts all words at once, and no prediction may read the word that it has to predict.
def not_padding(ids: Tensor) -> Tensor:
    """Return a mask [B, 1, 1, S], the same for all heads and queries."""
    return (ids != PAD)[:, None, None, :]


def causal(ids: Tensor) -> Tensor:
    """Return a mask [T, T]. It also hides padding, which comes after all words."""
    return torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()


# Section 3.3. Attention moves information between tokens. This network then transforms each token separately.
def feed_forward(d_model: int, d_ff: int) -> nn.Sequential:
    """Return the network of equation 2, max(0, x W_1 + b_1) W_2 + b_2."""
    return nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))


# Section 3.4. Source, target and output layer share one table: to predict a word is to produce its vector.
class Embedding(nn.Module):
    """Token vectors plus positions, with dropout (section 5.4), and the output layer."""

    def __init__(self, vocabulary: int, d_model: int, dropout: float):
        super().__init__()
        self.table = nn.Parameter(torch.randn(vocabulary, d_model) / math.sqrt(d_model))
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: Tensor) -> Tensor:
        """Return vectors [B, T, D] of token ids [B, T]."""
        # Vectors of length 1 suit the output layer. Here they grow to sqrt(D): positions have sqrt(D / 2).
        x = self.table[ids] * math.sqrt(self.table.shape[1])
        return self.dropout(x + positions(*x.shape[1:]).to(x))

    def logits(self, x: Tensor) -> Tensor:
        """Return logits [B, T, V] of vectors [B, T, D]."""
        return x @ self.table.T


# Section 3.5. To attention, "dog bites man" and "man bites dog" are equal: it ignores order. So each position
# has a vector too. Its pairs of channels are like clock hands of different speeds: a step of k tokens turns
# each hand by the same angle from any position, so a head can learn to look k tokens back.
def positions(length: int, d_model: int) -> Tensor:
    """Return PE [length, D]: sin(p / 10000^(2i / D)) in channel 2i, and the cosine in channel 2i + 1."""
    speeds = 10000 ** (-torch.arange(0, d_model, 2, dtype=torch.float64) / d_model)
    angles = torch.arange(length)[:, None] * speeds
    return torch.stack([angles.sin(), angles.cos()], 2).flatten(1)


# Section 5.1. The paper has 4.5 million English-German pairs, split into parts of words. This grammar makes
# 2.5 million, in whole words. Articles and adjectives depend on gender and case, and verbs may split.
NOUNS = "man/Mann/0, dog/Hund/0, bird/Vogel/0, teacher/Lehrer/0, woman/Frau/1, cat/Katze/1, mouse/Maus/1, "
NOUNS += "cow/Kuh/1, child/Kind/2, girl/Mädchen/2, horse/Pferd/2, sheep/Schaf/2"
# The article and the adjective's ending for genders 0, 1 and 2, then for an object of gender 0.
ARTICLES = "the/der e/die e/das e/den en, a/ein er/eine e/ein es/einen en"
ADJECTIVES = "/, small/klein, big/groß, young/jung, tired/müd, clever/klug"
VERBS = "finds/find/findet//finden, sees/see/sieht//sehen, looks at/look at/sieht/an/ansehen, "
VERBS += "looks for/look for/sucht//suchen, calls/call/ruft/an/anrufen, invites/invite/lädt/ein/einladen"
MODALS = "/, can/kann, must/muss, wants to/will"
ADVERBS = "/, today/heute, often/oft, tomorrow/morgen, perhaps/vielleicht"


def pick(table: str) -> list[str]:
    """Return the fields of a random row."""
    return random.choice(table.split(", ")).split("/")


def noun_phrase(masculine: int) -> tuple[str, str]:
    """Return for example ("the small dog", "den kleinen Hund"); `masculine` is a column of ARTICLES."""
    (noun, nomen, gender), (adjective, adjektiv), (article, *forms) = map(pick, (NOUNS, ADJECTIVES, ARTICLES))
    artikel, ending = forms[int(gender) or masculine].split()
    return f"{article} {adjective} {noun}", f"{artikel} {adjektiv and adjektiv + ending} {nomen}"


def sentence_pair() -> tuple[str, str]:
    """Return for example ("today a cat calls the dog", "heute ruft eine Katze den Hund an")."""
    (adverb, adverbial), (modal, modalverb) = pick(ADVERBS), pick(MODALS)
    (subject, subjekt), (object_, objekt) = noun_phrase(masculine=0), noun_phrase(masculine=3)
    english, infinitive, german, last, infinitiv = pick(VERBS)
    if modal:
        english, german, last = f"{modal} {infinitive}", modalverb, infinitiv
    begin = f"{adverbial} {german} {subjekt}" if adverb else f"{subjekt} {german}"
    return f"{adverb} {subject} {english} {object_}", f"{begin} {objekt} {last}"


def batches(pairs: list[Pair], tokens: int) -> Iterator[list[Tensor]]:
    """Yield sources [B, S] and targets [B, T] of at most `tokens` tokens each, without end."""
    while True:
        groups: list[list[Pair]] = [[]]
        # Pairs of similar length share a batch, because the shorter ones are padded to the longest.
        for pair in sorted(random.sample(pairs, len(pairs)), key=lambda pair: max(map(len, pair))):
            if (len(groups[-1]) + 1) * max(map(len, pair)) > tokens:
                groups.append([])
            groups[-1].append(pair)
        for group in random.sample(groups, len(groups)):
            yield [nn.utils.rnn.pad_sequence([*map(torch.tensor, side)], True, PAD) for side in zip(*group)]


# Section 5.3. With the norm after the sum ("post-norm"), large early steps ruin the model. So the learning
# rate rises for `warmup` steps. It then falls as 1 / sqrt(step).
def learning_rate(step: int, d_model: int, warmup: int = 4000) -> float:
    """Return the rate of equation 3; the first step is 1."""
    return d_model**-0.5 * min(step**-0.5, step * warmup**-1.5)


# Section 5.4. A model that aims at probability 1 for each word becomes too sure of itself. Here it aims at
# 0.9, and 0.1 is spread over the vocabulary: the loss stays above 0, but translations get better.
def smoothed_loss(logits: Tensor, target: Tensor, smoothing: float = 0.1) -> Tensor:
    """Return the mean cross-entropy of logits [B, T, V] over the words of target [B, T], without padding."""
    losses = -logits.log_softmax(-1)[target != PAD]  # [words, V]
    right = losses.gather(1, target[target != PAD][:, None])
    return (1 - smoothing) * right.mean() + smoothing * losses.mean()


def train(model: Transformer, pairs: list[Pair], steps: int) -> None:
    """Train on small batches; the paper takes 100,000 steps of 25,000 tokens (sections 5.1 and 5.2)."""
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98), eps=1e-9)  # section 5.3
    for step, (source, target) in zip(range(1, steps + 1), batches(pairs, tokens=600)):
        optimizer.param_groups[0]["lr"] = learning_rate(step, model.embedding.table.shape[1], warmup=200)
        # The decoder reads the correct translation, shifted by one token, and predicts every next word.
        shifted = torch.cat([torch.full_like(target[:, :1], START), target[:, :-1]], 1)
        loss = smoothed_loss(model(source, shifted), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0 or step == steps:
            print(f"step {step}: loss {loss.item():.3f}")


# Section 6.1. The likeliest first word does not always begin the likeliest sentence, so the search extends
# several beginnings ("beams"). Every word lowers the probability of a sentence. Its logarithm is therefore
# divided by a length penalty; otherwise short translations would win.
@torch.no_grad()
def beam_search(model: Transformer, source: Tensor, beams: int = 4, alpha: float = 0.6) -> list[int]:
    """Return the translation of source [S] with the best log P / penalty (Wu et al. 2016, equation 14)."""
    memory, longest = model.encode(source[None]), len(source) + 50
    penalty = [((5 + length) / 6) ** alpha for length in range(longest + 1)]
    texts, log_p = source.new_full((1, 1), START), memory.new_zeros(1)
    finished: list[tuple[float, list[int]]] = []
    for length in range(1, longest + 1):
        logits = model.decode(texts, memory.expand(len(texts), -1, -1), source.expand(len(texts), -1))
        totals = log_p[:, None] + logits[:, -1].log_softmax(-1)  # [beams, V]
        # A beam can end only with END, so at least half of these extensions do not end.
        log_p, index = totals.flatten().topk(min(2 * beams, totals.numel()))
        texts = torch.cat([texts[index // totals.shape[1]], index[:, None] % totals.shape[1]], 1)
        ended = (texts[:, -1] == END) | (length == longest)
        for i in ended[:beams].nonzero().flatten().tolist():
            finished.append((log_p[i].item() / penalty[length], texts[i, 1:].tolist()))
        texts, log_p = texts[~ended][:beams], log_p[~ended][:beams]
        # log P only falls, and the last penalty is the largest: stop when no beam can win any more.
        if finished and not (log_p / penalty[-1] > max(finished)[0]).any():
            break
    return max(finished)[1]


def main(steps: int) -> None:
    """Train, then translate sentences that were not in the training data."""
    torch.set_num_threads(1)  # The matrices are small: several threads would wait for each other.
    random.seed(0)
    torch.manual_seed(0)
    texts = list(dict.fromkeys(sentence_pair() for _ in range(20_000)))
    words = ["<pad>", "<start>", "<end>", *sorted({*" ".join(map(" ".join, texts)).split()})]
    ids = {word: index for index, word in enumerate(words)}
    english, german = ([[ids[word] for word in pair[i].split()] + [END] for pair in texts] for i in (0, 1))
    pairs = list(zip(english, german))
    model = Transformer(len(words), d_model=64, layers=2, heads=4, d_ff=256)
    train(model, pairs[100:], steps)
    model.eval()
    translations = [beam_search(model, torch.tensor(source)) for source, _ in pairs[:100]]
    right = sum(translation == target for translation, (_, target) in zip(translations, pairs))
    print(f"{right} of 100 new sentences are translated without a mistake. Some of them:")
    for (text, _), translation in zip(texts[:5], translations):
        print(" ".join(text.split()), "->", " ".join(words[index] for index in translation if index != END))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 500)
