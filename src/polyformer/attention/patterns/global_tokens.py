"""Global tokens: the first tokens see everything and are seen by everything."""

import dataclasses
from typing import ClassVar

from polyformer.attention.patterns.global_base import FirstPositions
from polyformer.attention.patterns.structure import BlockNeeds, Structure
from polyformer.core.ranges import PositiveInt
from polyformer.core.sequence.reach import Reach


@dataclasses.dataclass(frozen=True)
class Global(FirstPositions):
    """Global tokens: the first `tokens` of each document see all keys and are seen by all queries.

    Tokens are counted in positions, so left padding and packed documents do not change them.
    """

    tokens: PositiveInt = 1

    paper: ClassVar[str] = "Beltagy et al. 2020 (Longformer), section 3.1"

    @property
    def structure(self) -> Structure:
        """The first `tokens` positions: no later token is global."""
        return Structure(reach=Reach(0, first=self.tokens), blocks=BlockNeeds(first=self.tokens))
