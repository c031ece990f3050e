"""Variable tracking: chains of assignments hidden in a text; find all variables with one value.

    VAR ABCDE = 71380 ... VAR FGHIJ = VAR ABCDE ... VAR KLMNO = VAR FGHIJ

Source: Hsieh et al. 2024 (RULER), section 3, with the prompt of its appendix. The assignments of a chain are
in order, and other chains may run between them.
"""

import random
import string
from dataclasses import dataclass
from typing import ClassVar

from polyformer.applications.probing.base import NOISE, ProbeTask, Sample


@dataclass(frozen=True)
class VariableTracking(ProbeTask):
    """`chains` chains, each a value and `hops` further variables; a unit is a line of `NOISE`."""

    chains: int = 1
    hops: int = 4

    new_tokens: ClassVar[int] = 30

    def sample(self, units: int, draw: random.Random) -> Sample:
        """Return a sample about the first chain."""
        count = self.hops + 1
        names: dict[str, None] = {}
        while len(names) < self.chains * count:
            names["".join(draw.choices(string.ascii_uppercase, k=5))] = None
        values = draw.sample(range(10_000, 100_000), self.chains)
        chains = [list(names)[i * count : (i + 1) * count] for i in range(self.chains)]
        # Lines and assignments, each at its place: the assignments of a chain at sorted random places.
        lines = [(float(i), " ".join(NOISE)) for i in range(units)]
        for value, chain in zip(values, chains):
            sources = [str(value), *(f"VAR {name}" for name in chain[:-1])]
            places = sorted(draw.uniform(-0.5, units - 0.5) for _ in chain)
            texts = [f"VAR {name} = {source}" for name, source in zip(chain, sources)]
            lines += zip(places, texts)
        text = "\n".join(line for _, line in sorted(lines, key=lambda line: line[0]))
        return Sample(
            "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
            f"{text}\nQuestion: Find all variables that are assigned the value {values[0]} in the text "
            "above.",
            " Answer: According to the chain(s) of variable assignment in the text above, "
            f"{count} variables are assigned the value {values[0]}, they are:",
            tuple(chains[0]),
        )
