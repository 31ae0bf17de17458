"""`attnswap fit|validate|test|predict|show-batch`."""
