"""A trained model with another attention: the new attention learns from the old, then the model is tuned.

`attention_transfer` trains every layer's new attention for itself, `low_rank_tuning` the whole model. Zhang
et al. 2025 (LoLCATs), section 3.
"""

from polyformer.applications.linearizing.attention_transfer import transfer_attention
from polyformer.applications.linearizing.low_rank_tuning import check_tunable, tune_low_rank

__all__ = ["check_tunable", "transfer_attention", "tune_low_rank"]
