"""`attnswap compare`: configurations by seeds, paired, resumable, with intervals and verdicts."""
