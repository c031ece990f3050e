"""Sources of rows: names, files, folders, data sets, and the splits that are read from them."""
