"""How Sphinx builds the documentation: `make docs`."""

import os
import re
import sys
from pathlib import Path

from attention_modules import __version__

sys.path.insert(0, str(Path(__file__).parent / "extensions"))
# Tutorials run the command of the environment that builds the site.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

project = "attnswap"
author = "the authors of attnswap"
copyright = "the authors of attnswap, Apache-2.0"
version = release = __version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax", "sphinx_design"]
extensions += ["attnswap_command"]
exclude_patterns = ["_build", "extensions", "results/*/**"]  # beside each page of results: the files that it links to

html_theme = "furo"
html_title = f"attnswap {version}"
html_copy_source = False

# Pages in Markdown; those of docs/ are read on their own too, hence links between files and GitHub's anchors.
myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

# Tutorials run when they are built, each in a kernel of its own, and write into a temporary folder.
nb_execution_mode = "cache"
nb_execution_timeout = 600  # seconds per cell, on a machine that is busy with other work
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_merge_streams = True
nb_render_markdown_format = "myst"  # with tables
nb_output_stderr = "remove"  # what Lightning says of devices and tips; a tutorial prints the warnings that it is about

# One entry for each public name, by the name of the front door.
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signature says the default, the text what it takes
autodoc_inherit_docstrings = False
napoleon_use_rtype = False
napoleon_use_param = True
add_module_names = False

# Objects of torch, Lightning and timm are named in the text, and documented by their own projects.
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r"(torch|lightning|timm|transformers|numpy)\b.*")]
suppress_warnings = ["mystnb.unknown_mime_type"]


LINK_TO_MARKDOWN = re.compile(r"\]\(((?!\w+:)[^)#\s]+\.md)(?=[)#])")


def link_files_that_are_no_pages(app, docname, source):
    """The pages are read on their own, too: what they link to beside docs/ is a file to download here."""

    def link(match):
        folder = Path(docname).parent
        target = Path(os.path.normpath(folder / match[1]))
        if target == Path("../CONTRIBUTING.md"):
            return f"]({os.path.relpath('how_to/contributing.md', folder)}"
        return match[0] if str(target.with_suffix("")) in app.env.found_docs else f"](path:{match[1]}"

    source[0] = LINK_TO_MARKDOWN.sub(link, source[0])


def find_by_last_name(app, env, node, contnode):
    """Docstrings name objects by where they live; the site has each once, by its public name."""
    if node.get("refdomain") != "py":
        return None
    domain = env.domains.python_domain
    name = "." + node["reftarget"].rpartition(".")[2]
    found = {entry.node_id: full for full, entry in domain.objects.items() if full.endswith(name)}
    if len(found) != 1:
        return None
    (full,) = found.values()
    return domain.resolve_xref(env, node["refdoc"], app.builder, node["reftype"], full, node, contnode)


def setup(app):
    app.connect("source-read", link_files_that_are_no_pages)
    app.connect("missing-reference", find_by_last_name)
