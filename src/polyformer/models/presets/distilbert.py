"""DistilBERT: BERT's layout with half the layers and no token types."""

from polyformer.models.config import ModelConfig
from polyformer.models.presets.base import model_config, register


@register("distilbert-base")
def distilbert_base() -> ModelConfig:
    """DistilBERT, BERT with half the layers: 6 layers of 768, 67M parameters (Sanh et al. 2019, table 3).

    The table says 66M, without the masked head's own layer.
    """
    return model_config("bert-base", {"num_hidden_layers": 6, "type_vocab_size": 0, "pad": 0})
