"""Linear maps of every token: the piece, and modules whose norm is kept by construction."""
