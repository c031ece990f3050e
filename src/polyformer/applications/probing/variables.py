"""Variable tracking: chains of assignments hidden in a text; find all variables with one value.

    VAR ABCDE = 71380 ... VAR FGHIJ = VAR ABCDE ... VAR KLMNO = VAR FGHIJ

Source: Hsieh et al. 2024 (RULER), section 3, with the prompt of its code, including spaces and spelling, on
which scores of small models depend. The assignments of a chain are in order, and other chains may run between
them.
"""

import random
import string
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

from polyformer.applications.probing.base import NOISE, ProbeTask, Sample, draw_places


@dataclass(frozen=True)
class VariableTracking(ProbeTask):
    """`chains` chains, each a value and `hops` further variables; a unit is a line of `NOISE`.

    letters: of the name of a variable.
    """

    chains: int = 1
    hops: int = 4
    letters: int = 5

    new_tokens: ClassVar[int] = 30

    def sample(self, units: int, draw: random.Random) -> Sample:
        """Return a sample about the first chain."""
        count = self.hops + 1
        names: dict[str, None] = {}
        while len(names) < self.chains * count:
            names["".join(draw.choices(string.ascii_uppercase, k=self.letters))] = None
        values = draw.sample(range(10_000, 100_000), self.chains)
        chains = [list(names)[i * count : (i + 1) * count] for i in range(self.chains)]
        # Noise and assignments, each at its place: the assignments of a chain before sorted random lines.
        parts = [(place, " ".join(NOISE) + "\n") for place in range(units)]
        for value, chain in zip(values, chains):
            places = sorted(draw_places(max(units, 1), count, draw))
            texts = [f"VAR {chain[0]} = {value}"]
            texts += [f"VAR {name} = VAR {source} " for source, name in pairwise(chain)]
            parts += [(place - 0.5, text) for place, text in zip(places, texts)]
        text = " ".join(part for _, part in sorted(parts, key=lambda part: part[0]))
        return Sample(
            "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
            f"{text}\nQuestion: Find all variables that are assigned the value {values[0]} in the text "
            "above.",
            " Answer: According to the chain(s) of variable assignment in the text above, "
            f"{count} variables are assgined the value {values[0]}, they are:",
            tuple(chains[0]),
        )

    def demonstration(self, draw: random.Random) -> str:
        """Return a chain of shorter names in ten lines of noise."""
        sample = replace(self, letters=3).sample(10, draw)
        return f"{sample.text}{sample.prefix}  {' '.join(sample.answers)}\n\n"
