"""Peak memory of preparing a synthetic text as large as WikiText-103: `python benchmarks/wikitext103_memory.py`.

Writes 103 million tokens over 267,735 words to parquet in the hub's layout, prepares it in a process of its own, and
writes that process's peak resident memory to `benchmarks/results/wikitext103_memory.md`.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

NAME = "wikitext-103-v1"
TOKENS, LINES, WORDS, HELD_OUT_LINES = 103_227_021, 1_801_350, 267_733, 4_000
LINES_A_GROUP = 20_000
LIMIT_GIB = 2
RESULTS = Path(__file__).parent / "results" / "wikitext103_memory.md"
ROOT = Path(__file__).parents[1]

MEASURE = """
import json, resource, sys, time
from attnswap.datamodules import WikiTextDataModule
imported = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.perf_counter()
data = WikiTextDataModule("wikitext-103-v1", root=sys.argv[1], cache_dir=sys.argv[2])
data.prepare_data()
seconds = time.perf_counter() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
data.setup()
counts = {split: len(data.tokens(split)) for split in ("train", "validation", "test")}
print(json.dumps(dict(imported=imported, peak=peak, seconds=seconds, vocabulary=data.vocab_size, **counts)))
"""


def write_text(path: Path, lines: int, tokens: int, seed: int) -> None:
    """Writes `lines` lines of `tokens` words and line ends in all; frequencies fall as 1 / rank, every word occurs."""
    rng = np.random.default_rng(seed)
    words = np.array([f"word{index}" for index in range(WORDS)])
    cumulative = np.cumsum(1 / np.arange(1, WORDS + 1))
    ends = np.linspace(0, tokens - lines, lines + 1).astype(np.int64)
    with pq.ParquetWriter(path, pa.schema([("text", pa.string())])) as writer:
        for first in range(0, lines, LINES_A_GROUP):
            bounds = ends[first : first + LINES_A_GROUP + 1]
            ranks = np.searchsorted(cumulative, rng.random(bounds[-1] - bounds[0]) * cumulative[-1])
            if first == 0:
                ranks[: min(WORDS, len(ranks))] = np.arange(min(WORDS, len(ranks)))
            cuts = bounds - bounds[0]
            rows = [
                f" {' '.join(words[ranks[a:b]])} \n" for a, b in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True)
            ]
            writer.write_table(pa.table({"text": rows}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full size")
    scale = parser.parse_args().scale
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "wikitext" / NAME
        folder.mkdir(parents=True)
        write_text(folder / "train-00000-of-00001.parquet", int(LINES * scale), int(TOKENS * scale), seed=0)
        for seed, split in enumerate(("validation", "test"), start=1):
            write_text(folder / f"{split}-00000-of-00001.parquet", HELD_OUT_LINES, 60 * HELD_OUT_LINES, seed=seed)
        command = [sys.executable, "-c", MEASURE, scratch, str(Path(scratch) / "prepared")]
        answer = subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout
    report = _report(json.loads(answer.splitlines()[-1]))
    if scale == 1:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(report)
    print(report)


def _report(result: dict[str, float]) -> str:
    peak, imported = result["peak"] / 2**20, result["imported"] / 2**20
    return f"""# Preparing a text of WikiText-103's size

Synthetic text, words with frequencies falling as 1 / rank; `python benchmarks/wikitext103_memory.py`
on {platform.system()} {platform.machine()}, Python {platform.python_version()}, one thread.

| | |
|---|---|
| tokens, train / validation / test | {result["train"]:,} / {result["validation"]:,} / {result["test"]:,} |
| vocabulary | {result["vocabulary"]:,} |
| peak resident memory | {peak:.2f} GiB (limit {LIMIT_GIB} GiB: {"held" if peak < LIMIT_GIB else "NOT held"}) |
| of that, after the imports | {imported:.2f} GiB |
| time | {result["seconds"]:.0f} s |
"""


if __name__ == "__main__":
    main()
