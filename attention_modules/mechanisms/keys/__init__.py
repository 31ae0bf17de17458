"""Mechanisms that add a bias to the logits of a key, or a key."""
