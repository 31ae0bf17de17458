"""Mechanisms whose maps are no softmax, or mixtures of maps."""
