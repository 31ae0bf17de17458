"""`attnswap report`: one page about several runs, read from what they wrote."""
