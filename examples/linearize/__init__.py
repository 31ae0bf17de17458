"""A small causal language model with linear attention in its layers: teacher, conversion, comparison."""
