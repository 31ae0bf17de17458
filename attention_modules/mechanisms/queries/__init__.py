"""Mechanisms that change the length of queries and keys."""
