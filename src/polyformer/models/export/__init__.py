"""Export of models as graphs: a file for `torch.export`, or for ONNX and its runtimes."""

from polyformer.models.export.exporting import ExportedModel, export_model

__all__ = ["ExportedModel", "export_model"]
