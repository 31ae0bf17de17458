"""Pages of results: their numbers, tables and figures are made from the raw tables beside them."""
