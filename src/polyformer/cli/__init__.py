"""The command line: `main` finds the command, `commands` runs it, `plots` draws figures and pages."""
