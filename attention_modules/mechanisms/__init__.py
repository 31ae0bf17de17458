"""Attention mechanisms, one a file: a pure function under a thin class."""
