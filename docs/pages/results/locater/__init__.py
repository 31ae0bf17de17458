"""The pages on LocAteR."""
