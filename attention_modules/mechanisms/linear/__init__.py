"""Mechanisms of linear time, whose state is of fixed size."""
