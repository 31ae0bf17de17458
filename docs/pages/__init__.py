"""Makes the tables, the numbers and the figures of the pages of results from the raw files that are committed."""
