"""DistilBERT: BERT's layout with half the layers and no token types."""

from polyformer.models.config import ModelConfig
from polyformer.models.presets.base import model_config, register_sizes


@register_sizes(
    "DistilBERT, BERT with half the layers: {layers} layers of 768, 67M parameters "
    "(Sanh et al. 2019, table 3).",
    {"distilbert-base": ((6,),)},  # the table says 66M, without the masked head's own layer
)
def distilbert(layers: int) -> ModelConfig:
    """Return BERT-base with this number of layers, without token types."""
    return model_config("bert-base", {"num_hidden_layers": layers, "type_vocab_size": 0, "pad": 0})
