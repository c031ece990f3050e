"""The rows of `polyformer bench all`, by name, and what is asked of them."""

from polyformer.bench.table import attention_rows, generation_rows, model_rows, product_rows, training_rows
from polyformer.bench.table.row import Row

ROWS: dict[str, Row] = {
    row.name: row
    for module in (product_rows, training_rows, generation_rows, attention_rows, model_rows)
    for row in module.ROWS
}
