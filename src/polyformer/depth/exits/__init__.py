"""Early exits: a token leaves the decoder as soon as its prediction can be trusted.

After each of the exits' layers n a token's state h_n could be the last: the head reads finish_n(h_n) in place
of finish(h_L), with finish_n a norm of the exit's own, before it a linear map where `translation` says so.
A `rule` (rules.py, shortlist.py, multinomial.py) tells how much the prediction can be trusted, a number from
0 to 1, and the token leaves where that reaches the threshold,

    lambda'(t) = clip(0.9 lambda + 0.1 exp(-decay t / decay_length), 0, 1)      with a `decay`, else lambda

at position t, so that early tokens, on which more depends, must be surer. Its state h_n is copied to the
layers above, where later tokens attend to it. With a threshold of 1 no exit is taken but by certainty: what
a model was before it was calibrated, it is.

Training is `aligned`: all tokens run to the end, and the loss is the mean of the losses at all exits and the
end, weighted by their layer (`loss_weights: layer`) or equally, plus `rule_loss` times that of the rule. Or
it is `mixed`: every token leaves at an exit drawn at random, others attend to the copies, and the rule is not
trained. With `alone` the model stays as it is, and exits and rule are trained alone.

Elbayad et al. 2020 (Depth-Adaptive Transformer), sections 3 and 4; Schuster et al. 2022 (CALM), section 3.
"""

from polyformer.depth.exits import multinomial, rules, shortlist
from polyformer.depth.exits.exits import Exits, ExitsConfig, set_threshold
from polyformer.depth.exits.promise import CalibrationConfig

__all__ = ["CalibrationConfig", "Exits", "ExitsConfig", "multinomial", "rules", "set_threshold", "shortlist"]
