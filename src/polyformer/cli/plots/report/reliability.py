"""The reliability diagram of a classifier: its accuracy by the probability of its predicted label."""

from typing import Any

from polyformer.cli.plots.report.charts import Series, line_chart
from polyformer.cli.plots.report.page import figure, section, table
from polyformer.training.recipes.report import number
from polyformer.training.recipes.run import Run


def reliability(run: Run) -> str:
    """Return the section of a run with a record of its calibration; "" for other runs."""
    record: dict[str, Any] | None = run.facts.get("calibration")
    if not record:
        return ""
    changed = record["temperature"] != 1
    sides = {"before": record["before"], "after": record["after"]} if changed else {"model": record["before"]}
    lines = [Series(name, percent(side["bins"])) for name, side in sides.items()]
    lines.append(Series("perfectly calibrated", [(0.0, 0.0), (100.0, 100.0)]))
    cells = {name: [number(side["nll"]), number(side["calibration_error"])] for name, side in sides.items()}
    errors = ", ".join(f"{name} {values[1]}" for name, values in cells.items())
    label = f"accuracy by probability of the predicted label; expected calibration error: {errors}"
    rows = sum(count for _, _, count in record["before"]["bins"])
    result = (
        f"Logits are divided by {number(record['temperature'])}, the temperature with the lowest negative "
        "log-likelihood on these rows. No predicted label changes."
        if changed
        else "No temperature lowers the negative log-likelihood on these rows; the logits are unchanged."
    )
    text = (
        f"{rows:,} rows of the validation data, in {len(record['before']['bins'])} bins. Of the labels that "
        f"are predicted with a probability of 80 %, 80 % are right if the model is calibrated. {result}"
    )
    chart = line_chart(label, lines, "probability of the predicted label (%)", "accuracy (%)")
    columns = ["negative log-likelihood (nats)", "expected calibration error"]
    return section("Calibration", text, figure(chart), table("", columns, cells))


def percent(bins: list[tuple[float, float, int]]) -> list[tuple[float, float]]:
    """Return mean probability and accuracy of each bin in per cent."""
    return [(100 * sure, 100 * right) for sure, right, _ in bins]
