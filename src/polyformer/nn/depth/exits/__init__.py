"""Early exits: a token leaves the decoder as soon as its prediction is reliable.

A token's state h_n after the layer n of an exit can be its last state: the head reads finish_n(h_n) instead
of finish(h_L). finish_n is a separate norm of the exit, after a linear map if `translation` is "linear". A
`rule` (rules.py) estimates the confidence of the prediction, a number from 0 to
1, and the token leaves if it reaches the threshold,

    lambda'(t) = clip(0.9 lambda + 0.1 exp(-decay t / decay_length), 0, 1)      with a `decay`, else lambda

at position t, so that early tokens, which affect more of the text, need more confidence. The state h_n is
copied to the layers above, where later tokens attend to it. With a threshold of 1 tokens exit only with a
confidence of 1, so that a model is unchanged before its calibration.

Training is `aligned`: all tokens run through all layers, and the loss is the mean of the losses at all exits
and the end, weighted by their layer (`loss_weights: layer`) or equally, plus `rule_loss` times the rule's
loss. Or it is `mixed`: every token leaves at an exit drawn at random, others attend to the copies, and the
rule is not trained. With `alone` only exits and rule are trained, and the model is frozen.

Elbayad et al. 2020 (Depth-Adaptive Transformer), sections 3 and 4; Schuster et al. 2022 (CALM), section 3.
"""

from polyformer.nn.depth.exits import rules
from polyformer.nn.depth.exits.exits import CalibrationConfig, Exits, ExitsConfig, set_threshold

__all__ = ["CalibrationConfig", "Exits", "ExitsConfig", "rules", "set_threshold"]
