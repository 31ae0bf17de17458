"""Mechanisms that change the output of softmax attention."""
