"""Interventions: change a model during its calls, and measure the effect of each head.

with trace(model) as calls:
    calls.layer(3).head(5).output.set(0)
    model(ids)
print(ablate(model, ids).ranking()[:10])
"""

from polyformer.applications.interventions.ablation import Ablation, ablate, token_effects
from polyformer.applications.interventions.trace import TracedCalls, trace

__all__ = ["Ablation", "TracedCalls", "ablate", "token_effects", "trace"]
