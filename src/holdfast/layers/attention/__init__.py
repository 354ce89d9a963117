"""Softmax attention: the piece, its expansion, the trainable module."""
