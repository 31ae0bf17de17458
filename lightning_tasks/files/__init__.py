"""Checkpoints: written whole, read safely, loaded into other layouts, resumed."""
