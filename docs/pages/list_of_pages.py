"""The pages, in the order of README's table."""

from docs.pages.results import rpc_classification

PAGES = [rpc_classification.PAGE]
