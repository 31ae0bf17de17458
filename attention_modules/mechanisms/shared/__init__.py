"""What mechanisms share."""
