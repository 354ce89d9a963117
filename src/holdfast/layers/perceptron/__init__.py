"""Two linear maps with an activation between them: the pieces, their expansion, and layers of gain 1."""
