"""What concerns the model around the layers: its networks, what they share, and which of its Parameters are whose."""
