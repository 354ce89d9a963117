"""Functions of single entries: the functions, the pieces and the module."""
