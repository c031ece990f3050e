"""A pattern for each head of a trained model, under a budget of query-key pairs, without training.

patterns = candidates(length)
errors = head_errors(model, rows, patterns)
fitted = fit_pattern(errors, budget=0.25)
small, _ = convert(model, fitted.pattern)
"""

from polyformer.applications.pattern_fitting.candidates import candidates, pair_counts
from polyformer.applications.pattern_fitting.choosing import choose
from polyformer.applications.pattern_fitting.errors import HeadErrors, head_errors
from polyformer.applications.pattern_fitting.fitting import FittedPattern, check_budget, fit_pattern

__all__ = [
    "FittedPattern",
    "HeadErrors",
    "candidates",
    "check_budget",
    "choose",
    "fit_pattern",
    "head_errors",
    "pair_counts",
]
