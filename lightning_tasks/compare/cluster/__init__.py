"""Cells as commands of their own, on any number of machines with one folder."""
