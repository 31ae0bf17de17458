"""Attacks on images: one file per kind, and the table that names them."""
