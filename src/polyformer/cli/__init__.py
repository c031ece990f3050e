"""The command line: `main` finds the command, `commands` has a module for each, `plots` draws figures and
pages.
"""
