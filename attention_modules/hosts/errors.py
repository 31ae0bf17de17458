"""The one error of swapping."""


class AttentionSwapError(ValueError):
    """A swap or its undoing was refused; nothing of the model was changed."""
