"""Tables and figures that anyone can make again: one module for each."""
