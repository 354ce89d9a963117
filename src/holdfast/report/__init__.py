"""Tables and figures, made from result objects."""
