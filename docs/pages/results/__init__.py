"""One module for each page: the functions that return what stands in its marked regions."""
