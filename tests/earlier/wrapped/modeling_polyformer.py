"""Read by transformers with trust_remote_code=True. It needs `pip install polyformer`."""

from polyformer.hub import PolyformerConfig, PolyformerForCausalLM, PolyformerModel
