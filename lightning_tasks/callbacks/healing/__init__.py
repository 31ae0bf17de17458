"""Adapting a pretrained model to a swapped attention: the model as it was is the teacher."""
