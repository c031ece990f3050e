"""Our attention inside transformers' own models: `import polyformer.transformers_attention` registers it.

    import polyformer.transformers_attention
    model = AutoModel.from_pretrained(NAME, attn_implementation="polyformer")
    polyformer.attach(model, "Window(512) | Global(1)")

Needs transformers (`pip install 'polyformer[hub]'`). See docs/transformers.md.
"""

from polyformer.inside.attach import attach, detach
from polyformer.inside.explain import explain
from polyformer.inside.registration import NAME

__all__ = ["NAME", "attach", "detach", "explain"]
