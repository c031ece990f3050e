"""Position schemes as their papers write them, a pair of tokens at a time.

A scheme's module is read for its options and parameters alone; nothing here calls a function of the library.
"""

import math

import torch
from naive import Naive, Pair
from torch import Tensor


class NaiveNone(Naive, kind="none"):
    """No positions."""


def sinusoid(p: float, width: int, base: float = 10000.0) -> list[float]:
    """sin(p / base^(2i/E)) and cos of the same in turn: Vaswani et al. 2017, section 3.5."""
    angles = [p / base ** (2 * (channel // 2) / width) for channel in range(width)]
    return [math.cos(angle) if channel % 2 else math.sin(angle) for channel, angle in enumerate(angles)]


class NaiveSinusoidal(Naive, kind="sinusoidal"):
    """Of the paper; with `inclusive`, tensor2tensor's, whose last factor is the base itself."""

    def input(self, x: Tensor, p: int) -> Tensor:
        if self.layer:
            return x
        config, width = self.position.config, len(x)
        even = width - width % 2 if config.inclusive else width
        sines = (even + 1) // 2
        waves = []
        for channel in range(even):
            if config.layout == "halves":
                i, wave = channel % sines, math.sin if channel < sines else math.cos
            else:
                i, wave = channel // 2, math.cos if channel % 2 else math.sin
            exponent = i / max(even // 2 - 1, 1) if config.inclusive else 2 * i / even
            waves.append(wave((p + config.offset) / config.base**exponent))
        return x + torch.tensor(waves + [0.0] * (width - even), dtype=x.dtype)


class NaiveStepSinusoid(Naive, kind="step_sinusoid"):
    """Dehghani et al. 2019, section 2.1: a sinusoid of the position and one of the step, at every step."""

    def input(self, x: Tensor, p: int) -> Tensor:
        position, step = (sinusoid(number, len(x), self.position.base) for number in (p, self.layer))
        return x + torch.tensor(position, dtype=x.dtype) + torch.tensor(step, dtype=x.dtype)


class NaiveLearned(Naive, kind="learned"):
    """A vector for each position, added to the input of the first layer."""

    def input(self, x: Tensor, p: int) -> Tensor:
        return x if self.layer else x + self.position.tables[0].weight[p + self.position.offset]


class NaiveLearnedPerLayer(Naive, kind="learned_per_layer"):
    """A vector for each position and layer."""

    def input(self, x: Tensor, p: int) -> Tensor:
        return x + self.position.tables[self.layer].weight[p]


class NaiveAxial(Naive, kind="axial"):
    """A vector for each coordinate of the position in a grid, side by side."""

    def input(self, x: Tensor, p: int) -> Tensor:
        if self.layer:
            return x
        grid = self.position.grid
        coordinates = [p // math.prod(grid[axis + 1 :]) % grid[axis] for axis in range(len(grid))]
        vectors = [table.weight[at] for table, at in zip(self.position.tables, coordinates)]
        return x + torch.cat(vectors)


class NaiveGrid(Naive, kind="grid"):
    """The sum of vectors for the row, the column and the colour of place p of an image."""

    def input(self, x: Tensor, p: int) -> Tensor:
        if self.layer:
            return x
        sizes = [table.num_embeddings for table in self.position.tables]
        width, colours = sizes[1], (sizes[2] if len(sizes) == 3 else 1)
        x = x + self.position.tables[0].weight[p // (width * colours)]
        x = x + self.position.tables[1].weight[p // colours % width]
        return x + self.position.tables[2].weight[p % colours] if len(sizes) == 3 else x


class NaiveXpos(Naive, kind="xpos"):
    """Pair m of the rotated q and k, as complex numbers, times zeta_m^((i - j) / b), Sun et al. 2022."""

    def score(self, q: Tensor, k: Tensor, pair: Pair) -> Tensor:
        config, half, total = self.position.config, len(q) // 2, torch.zeros((), dtype=q.dtype)
        for m in range(half):
            zeta = (m / half + config.gamma) / (1 + config.gamma)
            angle = (pair.i - pair.j) * config.base ** (-m / half)
            a, b = torch.complex(q[m], q[m + half]), torch.complex(k[m], k[m + half])
            turned = a * b.conj() * complex(math.cos(angle), math.sin(angle))
            total = total + turned.real * zeta ** ((pair.i - pair.j) / config.scale_base)
        return total / math.sqrt(len(q))


class NaiveRope(Naive, kind="rope"):
    """Every pair of channels times its 2 x 2 rotation, Su et al. 2021, section 3.2; and its extensions."""

    def dynamic(self, theta: float, base: float, m: int, width: int, i: int) -> float:
        """The base of the first length N, 2 N, 4 N, ... that is at least the text's, i + 1 tokens."""
        extension = self.position.config.extension
        length = extension.original_max_positions
        if i < length or width == 2:
            return theta
        while length < i + 1:
            length *= 2
        factor = extension.factor * length / extension.original_max_positions - (extension.factor - 1)
        return (base * factor ** (width / (width - 2))) ** (-2 * m / width)

    def angle(self, m: int, width: int, i: int) -> float:
        """The angle of pair m from one position to the next, in a text that ends with the query at i."""
        config = self.position.config
        if config.rotated and not config.rotated[self.layer % len(config.rotated)]:
            return 0.0
        base, extension = config.base, config.extension
        base = config.bases[self.layer % len(config.bases)] if config.bases else base
        theta = base ** (-2 * m / width)
        if extension is None or extension.kind == "self_extend":
            return theta
        if extension.kind == "dynamic":
            return self.dynamic(theta, base, m, width, i)
        if extension.kind == "longrope":
            short = i < extension.original_max_positions
            return theta / (extension.short_factor if short else extension.long_factor)[0]
        if extension.kind == "interpolation":
            return theta / extension.factor
        if extension.kind == "ntk":
            return (
                theta
                if width == 2
                else (base * extension.factor ** (width / (width - 2))) ** (-2 * m / width)
            )
        if extension.kind == "llama3":
            turns = extension.original_max_positions * theta / (2 * math.pi)
            if turns >= extension.high_freq_factor:
                return theta
            low, high = extension.low_freq_factor, extension.high_freq_factor
            kept = max(turns - low, 0) / (high - low)
            return kept * theta + (1 - kept) * theta / extension.factor
        assert extension.kind == "yarn"
        first, last = (
            width * math.log(extension.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(base))
            for turns in (extension.beta_fast, extension.beta_slow)
        )
        first, last = max(math.floor(first), 0), min(math.ceil(last), width - 1)
        interpolated = min(max((m - first) / max(last - first, 0.001), 0), 1)
        return interpolated * theta / extension.factor + (1 - interpolated) * theta

    def rotated(self, x: Tensor, p: int, i: int = 0) -> Tensor:
        """x at position p, for a query at position i."""
        config, width = self.position.config, int(len(x) * self.position.config.fraction)
        size = 1.0
        if config.extension is not None and config.extension.kind == "yarn":
            size = config.extension.attention_factor or 0.1 * math.log(config.extension.factor) + 1
        if config.extension is not None and config.extension.kind == "longrope":
            length = config.extension.original_max_positions
            size = math.sqrt(1 + math.log(config.extension.factor) / math.log(length))
        out = x.clone()
        for m in range(width // 2):
            angle = p * self.angle(m, width, i)
            pair = [m, m + width // 2] if config.layout == "halves" else [2 * m, 2 * m + 1]
            rotation = [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
            matrix = torch.tensor(rotation, dtype=x.dtype) * size
            out = out.index_copy(0, torch.tensor(pair), matrix @ x[pair])
        return out

    def score(self, q: Tensor, k: Tensor, pair: Pair) -> Tensor:
        i, j, extension = pair.i, pair.j, self.position.config.extension
        if extension is not None and extension.kind == "self_extend":
            distant = i - j >= extension.window and i >= extension.original_max_positions
            if distant:
                group, window = extension.factor, extension.window
                i, j = i // group + window - window // group, j // group
        return super().score(self.rotated(q, i, pair.i), self.rotated(k, j, pair.i), pair)


class NaiveAlibi(Naive, kind="alibi"):
    """Press et al. 2022, section 3: q k / sqrt(D) - m |i - j|, slopes as in the authors' code."""

    def score(self, q: Tensor, k: Tensor, pair: Pair) -> Tensor:
        heads, power = len(self.position.slopes), 1
        while 2 * power <= heads:
            power *= 2
        h = pair.head
        slope = 2 ** (-8 * (h + 1) / power) if h < power else 2 ** (-4 * (2 * (h - power) + 1) / power)
        return super().score(q, k, pair) - self.position.slope_scale * slope * abs(pair.i - pair.j)


class NaiveT5(Naive, kind="t5"):
    """Raffel et al. 2020, section 2.1: a bias for the bucket of j - i; with MPNet's learned positions."""

    def input(self, x: Tensor, p: int) -> Tensor:
        if self.layer or not self.position.config.absolute:
            return x
        return x + self.position.absolute.tables[0].weight[p + self.position.config.offset]

    def bucket(self, distance: int, causal: bool) -> int:
        """Distances one by one, then logarithmically: in whole numbers, so that no boundary is rounded."""
        count, longest = self.position.config.num_buckets, self.position.config.max_distance
        first = 0
        if not causal:
            count //= 2
            first = count if distance < 0 else 0
            distance = abs(distance)
        distance, exact = max(distance, 0), count // 2
        if distance < exact:
            return first + distance
        steps, far = count - exact, 0  # the greatest with exact (longest / exact)^(far / steps) <= distance
        while far < steps - 1 and longest ** (far + 1) * exact ** (steps - far - 1) <= distance**steps:
            far += 1
        return first + exact + far

    def score(self, q: Tensor, k: Tensor, pair: Pair) -> Tensor:
        bias = self.position.table.weight[self.bucket(pair.i - pair.j, pair.causal), pair.head]
        return super().score(q, k, pair) + bias


class NaiveGridBias(Naive, kind="grid_bias"):
    """Bao et al. 2022, section 2.2: a number for the difference of two patches' rows and columns."""

    def score(self, q: Tensor, k: Tensor, pair: Pair) -> Tensor:
        height, width = self.position.shape
        i, j = pair.i - self.position.first, pair.j - self.position.first
        patches = [(r, c) for r in range(1 - height, height) for c in range(1 - width, width)]
        names = [*patches, "first to patch", "patch to first", "first to first"]
        if i < 0:
            name = "first to first" if j < 0 else "first to patch"
        else:
            name = "patch to first" if j < 0 else (i // width - j // width, i % width - j % width)
        tables = self.position.tables
        table = tables[self.layer if len(tables) > 1 else 0].weight
        return super().score(q, k, pair) + table[names.index(name), pair.head]


class NaiveShaw(Naive, kind="shaw"):
    """Equations 3 to 5 of Shaw et al. 2018; with a single table all layers share it."""

    @property
    def table(self) -> int:
        return self.layer % len(self.position.keys)

    def entry(self, pair: Pair) -> int:
        clip = self.position.clip
        return max(-clip, min(clip, pair.j - pair.i)) + clip

    def score(self, q: Tensor, k: Tensor, pair: Pair) -> Tensor:
        return super().score(q, k + self.position.keys[self.table].weight[self.entry(pair)], pair)

    def value(self, v: Tensor, pair: Pair) -> Tensor:
        if not self.position.values:
            return v
        return v + self.position.values[self.table].weight[self.entry(pair)]


class NaiveTransformerXL(Naive, kind="transformer_xl"):
    """The four terms (a) to (d) of Dai et al. 2019, section 3.3."""

    def score(self, q: Tensor, k: Tensor, pair: Pair) -> Tensor:
        limit, distance = self.position.config.clamp_distance, pair.i - pair.j
        if limit is not None:
            distance = max(-limit, min(limit, distance))
        waves = torch.tensor(sinusoid(distance, self.position.hidden_size), dtype=q.dtype)
        key = (self.position.projections[self.layer].weight @ waves).view(-1, len(q))[pair.head]
        own = 0 if self.position.config.shared_biases else self.layer
        u, v = self.position.u[own][pair.head, 0], self.position.v[own][pair.head, 0]
        return (q @ k + q @ key + u @ k + v @ key) / math.sqrt(len(q))


class NaiveXLNet(NaiveTransformerXL, kind="xlnet"):
    """Yang et al. 2019, section 2.5: a further term (q_i + b) . s_ij."""

    def score(self, q: Tensor, k: Tensor, pair: Pair) -> Tensor:
        bias = self.position.w[self.layer % len(self.position.w)][pair.head, 0]
        segment = self.position.segments[self.layer][0 if pair.same_segment else 1, pair.head]
        return super().score(q, k, pair) + (q + bias) @ segment / math.sqrt(len(q))


class NaiveDeberta(Naive, kind="deberta"):
    """He et al. 2021, equations 2 to 4; the logarithmic buckets are those of the second version."""

    def input(self, x: Tensor, p: int) -> Tensor:
        return x + self.position.absolute.weight[p] if self.position.config.absolute and not self.layer else x

    def bucket(self, distance: int) -> int:
        """A distance of either sign: itself up to half, then the least that reaches it, in whole numbers."""
        half, longest = self.position.config.buckets // 2, self.position.config.max_relative_positions - 1
        size, far = abs(distance), 0
        if size <= half:
            return distance
        while longest**far * half ** (half - 1) < size ** (half - 1) * half**far:
            far += 1
        return int(math.copysign(half + far, distance))

    def row(self, distance: int) -> Tensor:
        """delta(i, j): the relative embedding of a distance."""
        config, table = self.position.config, self.position.table.weight
        k = len(table) // 2
        distance = distance if config.buckets is None else self.bucket(distance)
        row = table[max(0, min(2 * k - 1, distance + k))]
        if config.norm_embeddings:
            norm, centred = self.position.norm, row - row.mean()
            row = centred / (centred.square().mean() + config.eps).sqrt() * norm.weight + norm.bias
        return row

    def score(self, q: Tensor, k: Tensor, pair: Pair) -> Tensor:
        config, distance, total = self.position.config, pair.i - pair.j, q @ k
        if "c2p" in config.terms:
            row = self.row(distance)
            key = row @ self.key if config.share_projections else self.position.keys[self.layer].weight @ row
            total = total + q @ key.view(-1, len(q))[pair.head]
        if "p2c" in config.terms:
            row = self.row(-distance if config.mirrored else distance)
            if config.share_projections:
                query = row @ self.query
            else:
                own = self.position.queries[self.layer]
                query = own.weight @ row + own.bias
            total = total + query.view(-1, len(q))[pair.head] @ k
        return total / math.sqrt(len(q) * (1 + len(config.terms)))


class NaiveDistanceAware(Naive, kind="da"):
    """The function f of Wu et al. 2021, section 3, as it stands there."""

    def score(self, q: Tensor, k: Tensor, pair: Pair) -> Tensor:
        w, b = self.position.w[self.layer, pair.head], self.position.b[self.layer, pair.head]
        factor = (1 + b.exp()) / (1 + (b - w * abs(pair.i - pair.j)).exp())
        return (q @ k).relu() * factor / math.sqrt(len(q))


class NaiveRelationLabels(Naive, kind="relation_labels"):
    """Ainslie et al. 2020, section 3: q_i . (k_j + a_l) / sqrt(D), l the label that the caller gave."""

    def score(self, q: Tensor, k: Tensor, pair: Pair) -> Tensor:
        table = self.position.tables[self.layer].weight
        return super().score(q, k if pair.label < 0 else k + table[pair.label], pair)


class NaiveRelationBias(Naive, kind="relation_bias"):
    """A number for each label and head."""

    def score(self, q: Tensor, k: Tensor, pair: Pair) -> Tensor:
        bias = 0.0 if pair.label < 0 else self.position.tables[self.layer].weight[pair.label, pair.head]
        return super().score(q, k, pair) + bias


class NaiveEtcLabels(Naive, kind="etc_labels"):
    """Labels of [global; long]: distances in either part, across them whether the sentence is shared."""

    def score(self, q: Tensor, k: Tensor, pair: Pair) -> Tensor:
        glob, longest = self.position.config.global_tokens, self.position.config.max_distance
        distance = max(-longest, min(longest, pair.i - pair.j))
        long_query, long_key = pair.i >= glob, pair.j >= glob
        order: list[tuple[str, int]] = [("l2l", d) for d in range(-longest, longest + 1)]
        order += [("g2g", d) for d in range(-longest, longest + 1)]
        order += [("l2g", 0), ("l2g", 1), ("g2l", 0), ("g2l", 1)]
        piece = ("l" if long_query else "g") + "2" + ("l" if long_key else "g")
        number = distance if long_query == long_key else int(pair.same_segment)
        vectors = self.position.tables[self.layer].weight.view(len(order), -1, len(q))
        return super().score(q, k + vectors[order.index((piece, number)), pair.head], pair)


class NaiveConcatenated(Naive, kind="concatenated"):
    """W [x ; s], a channel of the output at a time; s is what the other scheme adds to nothing."""

    def input(self, x: Tensor, p: int) -> Tensor:
        if self.layer:
            return x
        position = self.position
        vectors = {"Sinusoidal": NaiveSinusoidal, "Learned": NaiveLearned}[type(position.vectors).__name__]
        beside = vectors(position.vectors, 0).input(x.new_zeros(position.width), p)
        both = [*x, *beside]
        return torch.stack(
            [sum(w * number for w, number in zip(row, both)) for row in position.projection.weight]
        )
