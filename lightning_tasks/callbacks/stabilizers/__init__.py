"""Callbacks that keep the logits and the entropy of attention within limits, and the monitor that shows the need."""
