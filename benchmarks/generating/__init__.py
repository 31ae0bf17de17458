"""What mechanisms with a state cost: growth with the tokens, and while models write."""
