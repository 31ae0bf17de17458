"""What is wrong with a page, or with the raw tables that it is made from."""


class PageError(Exception):
    """A page or a raw table that cannot be used; the text names it and the cure."""
