"""Matplotlib figures, from plain arrays and rows."""
