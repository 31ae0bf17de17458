"""Mechanisms whose cost is linear in the number of tokens: a state of fixed size stands for all tokens so far."""
