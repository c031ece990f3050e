"""DistilBERT: BERT's layout with half the layers and no token types."""

from polyformer.model import ModelConfig, SpecialTokens
from polyformer.presets.base import register
from polyformer.presets.encoder import bert


@register("distilbert-base")
def distilbert_base() -> ModelConfig:
    """Sanh et al. 2019, table 3: six layers of 768, 66M parameters (67M with the masked head's own)."""
    return bert(6, 768, 12, types=0, special=SpecialTokens(pad=0))
