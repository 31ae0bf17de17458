"""What a GPU gave: the tables of the page, of what `benchmarks/gpu_day.sh` wrote into docs/results/gpu."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from docs.pages.numbers import number, significant
from docs.pages.page import Page
from docs.pages.raw import Raw, json_of
from docs.pages.tables import Table, nothing_yet

OK = "ok"
OUTCOMES = ("passed", "failed", "skipped")
KINDS = ("output", "gradient", "parameter")
PAGE = Page("gpu", title="On a GPU")
Row = Mapping[str, str]


def _rows(raw: Raw, name: str) -> Sequence[Row]:
    """The rows of a file; none where it is not there."""
    return raw.rows(name) if (raw.folder / name).is_file() else []


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    return Table(heads, rows) if rows else nothing_yet(*heads)


def _ratio(row: Row, of: str, to: str) -> str:
    """With two digits; "" where either is missing, or the second 0."""
    if not row.get(of) or not float(row.get(to) or 0):
        return ""
    return number(float(row[of]) / float(row[to]), 2)


def _amount(row: Row, name: str, digits: int = 1) -> str:
    return number(float(row[name]), digits) if row.get(name) else ""


def _short(row: Row) -> str:
    """The state of a row, where it is not measured."""
    return "" if row["state"] == OK else row["state"].replace("|", "/")


@PAGE.numbers
def where(raw: Raw) -> dict[str, str]:
    """The machine, or that there was none."""
    about = json_of(raw.folder / "about.json")
    if about is None:
        return {"machine": "**none; no GPU was at hand, and no number of this page has been measured yet.**"}
    device = "a dry run, no GPU"
    if "GPU" in about:
        device = f"{about['GPU']} with {about['GPU memory']}, CUDA {about['CUDA']}"
    packages = ", ".join(f"{name} {about[name]}" for name in ("lightning", "timm", "transformers", "litgpt", "triton"))
    return {"machine": f"{device}; {about['machine']}; {packages}."}


@PAGE.table
def parts(raw: Raw) -> Table:
    """What ran, and how it ended; a part that ran again has its last state."""
    last = {row["part"]: row for row in _rows(raw, "parts.csv")}
    heads = ["part", "state", "seconds", "limit"]
    return _table(heads, [[row[head] for head in heads] for row in last.values()])


@PAGE.table
def tests(raw: Raw) -> Table:
    """How many tests of each file passed."""
    rows = _rows(raw, "tests.csv")
    files = dict.fromkeys(row["test"].partition("::")[0] for row in rows)
    count = {
        name: [sum(row["test"].startswith(f"{name}::") and row["outcome"] == each for row in rows) for each in OUTCOMES]
        for name in files
    }
    return _table(["file", *OUTCOMES], [[name, *map(str, each)] for name, each in count.items()])


@PAGE.table
def failures(raw: Raw) -> Table:
    """The tests that failed."""
    failed = [row for row in _rows(raw, "tests.csv") if row["outcome"] == "failed"]
    rows = [[f"`{row['test']}`", row["why"].replace("|", "/")] for row in failed]
    return _table(["test", "why"], rows or ([["none", ""]] if _rows(raw, "tests.csv") else []))


@PAGE.table
def distances(raw: Raw) -> Table:
    """By precision, the largest distances of all mechanisms to their float64."""
    found: dict[str, list[tuple[dict[str, float], str]]] = {}
    for row in _rows(raw, "tests.csv"):
        name, _, case = row["test"].partition("[")
        if name.endswith("test_near_its_float64") and row["found"]:
            mechanism, _, precision = case.removesuffix("]").rpartition("-")
            values = {kind: float(value) for kind, _, value in (each.partition("=") for each in row["found"].split())}
            found.setdefault(precision, []).append((values, mechanism))
    rows = []
    for precision, each in found.items():
        largest = [max((values[kind], name) for values, name in each) for kind in KINDS]
        rows.append([precision, str(len(each)), *(f"{value:.1e} ({name})" for value, name in largest)])
    return _table(["precision", "mechanisms", "output", "gradient of an input", "gradient of a parameter"], rows)


@PAGE.table
def rpc(raw: Raw) -> Table:
    """RPC beside n passes of the fused kernel."""
    heads = ["shape (B, H, N, d)", "dtype", "mode", "floor, ms", "eager / floor", "compiled / floor", "naive / eager"]
    rows = [
        [
            f"{row['shape']} {row['B, H, N, d']}",
            row["dtype"],
            row["mode"],
            _amount(row, "floor ms", 3),
            _ratio(row, "eager ms", "floor ms"),
            _ratio(row, "compiled ms", "floor ms"),
            _ratio(row, "naive ms", "eager ms"),
            _ratio(row, "eager MiB", "floor MiB"),
            _short(row),
        ]
        for row in _rows(raw, "rpc.csv")
    ]
    return _table([*heads, "memory, eager / floor", "state"], rows)


@PAGE.table
def mechanisms(raw: Raw) -> Table:
    """Time of each mechanism to plain attention: forward, and forward with backward."""
    found = _rows(raw, "mechanisms.csv")
    shapes = list(dict.fromkeys((row["shape"], row["dtype"]) for row in found))
    by_place = {(row["mechanism"], row["shape"], row["dtype"]): row for row in found}

    def cell(row: Row | None) -> str:
        if row is None or row["state"] != OK:
            return "" if row is None else _short(row)
        return " / ".join(_ratio(row, f"{mode} ms", f"plain, {mode} ms") for mode in ("forward", "forward + backward"))

    names = dict.fromkeys(row["mechanism"] for row in found)
    rows = [[name, *(cell(by_place.get((name, *place))) for place in shapes)] for name in names]
    return _table(["mechanism", *(f"{shape}, {dtype}" for shape, dtype in shapes)], rows)


@PAGE.table
def memory(raw: Raw) -> Table:
    """Peak memory by length, and how it grew over the last fourfold."""
    found = _rows(raw, "memory.csv")
    lengths = sorted({int(row["tokens"]) for row in found})
    by_place = {(row["mechanism"], row["mode"], int(row["tokens"])): row for row in found}
    rows = []
    for name, mode in dict.fromkeys((row["mechanism"], row["mode"]) for row in found):
        there = [by_place.get((name, mode, length)) for length in lengths]
        cells = ["" if row is None else _short(row) or significant(float(row["MiB"] or "nan")) for row in there]
        measured = [float(row["MiB"]) for row in there if row is not None and row.get("MiB")]
        growth = number(measured[-1] / measured[-2], 1) if len(measured) > 1 and measured[-2] else ""
        rows.append([name, mode, *cells, growth])
    return _table(["mechanism", "mode", *(f"N = {length:,}, MiB" for length in lengths), "last / the one before"], rows)


@PAGE.table
def training(raw: Raw) -> Table:
    """Tokens and images per second beside the peers'."""
    rows = [
        [
            row["compared"],
            row["peer"],
            row["dtype"],
            row["compiled"],
            _amount(row, "a second", 0),
            _amount(row, "theirs a second", 0),
            _amount(row, "ratio", 2),
            f"{_amount(row, 'lower quartile', 2)} to {_amount(row, 'upper quartile', 2)}" if row.get("ratio") else "",
            _short(row),
        ]
        for row in _rows(raw, "training.csv")
    ]
    heads = ["model", "peer", "dtype", "compiled", "ours, a second", "theirs, a second", "ours / theirs", "quartiles"]
    return _table([*heads, "state"], rows)


LOCATER = {
    "val/perplexity": "validation perplexity",
    "val/attention/entropy/mean": "entropy, nats",
    "val/attention/effective_support/mean": "effective support",
    "qk_spectrum/mean/mean": "mean of the spectrum",
    "qk_spectrum/scale/mean": "scale of the spectrum",
}


@PAGE.table
def locater(raw: Raw) -> Table:
    """What the runs logged first and last."""
    found: dict[str, dict[str, dict[int, str]]] = {}
    for row in _rows(raw, "locater.csv"):
        found.setdefault(row["run"], {}).setdefault(row["metric"], {})[int(row["step"])] = row["value"]
    rows = []
    for run, metrics in found.items():
        ends = [metrics.get(name, {}) for name in LOCATER]
        cells = [f"{significant(float(of[min(of)]))} → {significant(float(of[max(of)]))}" if of else "" for of in ends]
        steps = max((step for of in metrics.values() for step in of), default=0)
        rows.append([run.removeprefix("locater_"), f"{steps:,}", *cells])
    return _table(["run", "last step", *LOCATER.values()], rows)
