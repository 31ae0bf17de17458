"""Callbacks of ours in training loops that are none of Lightning's."""
