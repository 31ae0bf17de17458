"""Callbacks that write tables and figures into the folder of a run."""
