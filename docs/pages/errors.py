"""What is wrong with a page, or with the raw files that it is made from."""


class PageError(Exception):
    """A page or a raw file that cannot be used; the text names it and the cure."""


def check_told(told: str, holds: bool) -> None:
    """Refuse raw files that say otherwise than a sentence of a page which has no number of its own.

    Raises:
        PageError: they do.
    """
    if not holds:
        raise PageError(f"the page says that {told}, and the raw files say otherwise: write it anew")
