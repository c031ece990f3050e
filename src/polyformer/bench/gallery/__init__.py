"""All claims at once: what is to be run, the processes, their page, and their list in the documentation."""
