"""DistilBERT: BERT's layout with half the layers and no token types."""

from polyformer.architecture import ModelConfig
from polyformer.presets.base import model_config, register


@register("distilbert-base")
def distilbert_base() -> ModelConfig:
    """Sanh et al. 2019, table 3: six layers of 768, 66M parameters (67M with the masked head's own)."""
    return model_config("bert-base", {"num_hidden_layers": 6, "type_vocab_size": 0, "pad": 0})
