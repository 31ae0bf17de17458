"""The raw files of a page: the values of comparisons, and other CSV, JSON and .npz files."""

from docs.pages.raw.comparison import RESULTS, Comparison, by_machine
from docs.pages.raw.folder import Raw
from docs.pages.raw.reading import asked_of, read_results, with_first
from docs.pages.raw.tables import json_of

__all__ = ["RESULTS", "Comparison", "Raw", "asked_of", "by_machine", "json_of", "read_results", "with_first"]
