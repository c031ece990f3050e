"""The commands of `polyformer`, a module each: a docstring (its help), `EXAMPLES`, `Options` and
`run(options)`.

Other modules are shared by commands: `options` (command line to dataclass), `input_lines` (texts to read),
`recipe_options` and `training_run` (of train and distill), `model_and_texts` (of explore, spectrum and
calibrate),
`show_pictures` and `show_prediction`, `evaluate_*`.
"""

COMMANDS = (
    "data",
    "record",
    "train",
    "distill",
    "evaluate",
    "datastore",
    "generate",
    "translate",
    "classify",
    "tag",
    "answer",
    "choose",
    "embed",
    "prompt",
    "list",
    "convert",
    "calibrate",
    "show",
    "explore",
    "spectrum",
    "tune",
    "bench",
    "reproduce",
    "completion",
)
