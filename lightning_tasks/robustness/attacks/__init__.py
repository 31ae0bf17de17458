"""Attacks on images: one file a kind, and the table that names them."""
