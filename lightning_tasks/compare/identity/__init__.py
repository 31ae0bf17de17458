"""What makes two cells of a comparison the same."""
