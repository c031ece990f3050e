"""The package of `polyformer bench`: the settings of a bench (`rows.Bench`) define a list of rows, `running`
measures each row with `measuring`, in this process or in others, `records` stores the results in a file and
`report` shows them.
"""
