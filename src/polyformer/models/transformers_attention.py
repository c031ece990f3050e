"""Our attention inside transformers' own models: `import polyformer.models.transformers_attention` registers
it.

    import polyformer.models.transformers_attention
    model = AutoModel.from_pretrained(NAME, attn_implementation="polyformer")
    polyformer.attach(model, "Window(512) | Global(1)")

Needs transformers (`pip install 'polyformer[hub]'`). See docs/transformers.md.
"""

from polyformer.models.attached import attach, detach, explain
from polyformer.models.attached.attention import NAME

__all__ = ["NAME", "attach", "detach", "explain"]
