"""What is wrong with a page, or with the raw files that it is made from."""


class PageError(Exception):
    """A page or a raw file that cannot be used; the text names it and the cure."""
