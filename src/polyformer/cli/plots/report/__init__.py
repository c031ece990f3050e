"""A run as one HTML page that requires no network: curves, baselines, samples, attention maps, costs."""

from polyformer.cli.plots.report.run import REPORT, write_report

__all__ = ["REPORT", "write_report"]
