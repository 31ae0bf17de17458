"""Mechanisms that read the values of another layer."""
