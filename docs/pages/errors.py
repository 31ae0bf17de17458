"""What is wrong with a page, or with the raw files that it is made from."""


class PageError(Exception):
    """A page or a raw file that cannot be used; the text names it and the cure."""


def check_told(told: str, holds: bool, found: object) -> None:
    """Refuse raw files that say otherwise than a sentence of a page which has no number of its own.

    Args:
        told: the sentence.
        holds: whether it is true of the raw files.
        found: what they say.

    Raises:
        PageError: it is not.
    """
    if not holds:
        raise PageError(f"the page says that {told}, and the raw files say {found}: write it anew")
