"""`attnswap explore`: one page in which every attention map of a model, or of several side by side, is looked at."""
