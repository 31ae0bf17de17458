"""Opening images that anybody may have written."""

import os
from io import BytesIO

from PIL import Image

_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")


def open_image(source: str | BytesIO) -> Image.Image:
    """An image of a format that Pillow decodes by itself, whatever the file's name says; it hands EPS to Ghostscript.

    Raises:
        OSError: it is of another format, or no file (a pipe would be waited for).
    """
    if isinstance(source, str) and not os.path.isfile(source):
        raise FileNotFoundError(f"{source} is no file")
    return Image.open(source, formats=_FORMATS)
