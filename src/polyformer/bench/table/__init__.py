"""`polyformer bench all`: a table of rows, each ours beside what people would take instead.

`rows` lists them, a `Row` says what it measures and what is asked of it, `measuring` does it, in a process of
its own (`processes`), `records` keeps what came out and `report` shows it.
"""
