"""Words of single pages, each a module by the name of its page: `words(folder)` gives them."""
