"""A directive that shows what the command `attnswap` prints: it is run, in this process, when the page is read."""

import contextlib
import io

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from lightning_tasks.__main__ import main


def printed_by(arguments: list[str]) -> str:
    """What `attnswap` prints to stdout with these arguments.

    Raises:
        RuntimeError: the command ended with an error.
    """
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main(arguments)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise RuntimeError(f"attnswap {' '.join(arguments)} ended with {end.code}: {err.getvalue()}") from end
    return out.getvalue()


class AttnswapCommand(SphinxDirective):
    """The output of a command, in a block of text: ``{attnswap} compare --help``."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        text = printed_by(self.arguments[0].split())
        return [nodes.literal_block(text, text, language="text")]


def setup(app):
    app.add_directive("attnswap", AttnswapCommand)
    return {"parallel_read_safe": True}
