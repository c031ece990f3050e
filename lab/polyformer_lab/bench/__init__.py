"""The package of `polyformer bench`: the settings of a bench (`rows.Bench`) define a list of rows. `running`
measures each row, in this process or in others, stores the results in a file and shows them.
"""
