"""All mechanisms side by side: which of them to try."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from pathlib import Path

from docs.pages.analyses.healing import swapped
from docs.pages.language import OPPOSITE, Folder
from docs.pages.numbers import in_turn, markdown, number

PARTS = {"images": ("test/top1", 1, 100.0, "higher"), "text": ("test/perplexity", 2, 1.0, "lower")}
HEADS = ["mechanism", "images: accuracy, higher is better", "text: perplexity, lower is better"]
HEADS += ["time", "memory", "keeps a pretrained output", "when to try it"]
NEUTRAL = {"none": "no", "its own": "yes", "at one length only": "`start=1/ln(n)`, at n tokens only"}
_NEUTRAL = re.compile(r"Neutral\s+start:\s+(none|its own|at one length only|`[^`]+`)")
_GOOD_FOR = re.compile(r"Good for: (.+?)(?:[.;:\n]|, (?:in )?wh)")
WHEN = {  # where the page says more than a clause
    "kde": "as a control of RPC-Attention and of the robust forms rkde and mom",
    "position_bias": "as the control of `scaled`; measured [on the page of `scaled`](scaled_attention.md)",
    "rpc": "its paper reports robustness of image models, [which our test did not confirm](rpc_autoattack.md)",
    "ssa": "contexts longer than those of the training, from a pretrained model",
}


def _of_page(root: Path, mechanism: str) -> tuple[str, str]:
    """With which options a swapped layer is as before, and what it is good for, of the mechanism's page."""
    page = (root / f"docs/explanations/mechanisms/{mechanism}.md").read_text(encoding="utf-8")
    start, good_for = (each.findall(re.sub(r"\[(.+?)\]\(.+?\)", r"\1", page))[0] for each in (_NEUTRAL, _GOOD_FOR))
    return NEUTRAL.get(start, start), WHEN.get(mechanism, good_for)


def words(folder: Folder) -> dict[str, Folder | Callable[..., str]]:
    """`images` and `text`, with all seeds; `which`, the table; `confirmed`, the names of some mechanisms."""
    root = folder.path.parents[2]
    parts = {part: folder.folder(part).and_seeds_of(folder.folder(f"{part}_more")) for part in PARTS}
    rows = {
        part: {
            row.config: row
            for row in found.comparison.summary
            if (row.metric, row.reference) == (PARTS[part][0], "softmax") and not row.config.startswith("softmax ")
        }
        for part, found in parts.items()
    }

    def which() -> str:
        """A row for each mechanism; bold differences hold, and mechanisms better than softmax come first."""
        costs: dict[str, list[str]] = {}
        for part in reversed(PARTS):  # of a mechanism in both, those of the images
            with (root / f"benchmarks/results/training_step_zoo_{part}.csv").open(encoding="utf-8") as file:
                first, *others = csv.DictReader(file)
            key = "peak memory of a step"
            costs |= {
                row["variant"]: [row["to the first"], number(int(row[key].split()[0]) / int(first[key].split()[0]), 2)]
                for row in others
            }
        drift, lines = swapped(folder.folder("../healing"), "drift"), []
        for name in sorted({*rows["images"], *rows["text"], "position_bias"}):
            cells, worth = [], 0
            for part, (metric, digits, scale, better) in PARTS.items():
                verdict = rows[part][name].verdict if name in rows[part] else ""
                text = parts[part].diff(metric, name, digits=digits, scale=scale) if verdict else ""
                cells.append(f"**{text}**" if verdict in OPPOSITE else text)
                worth += {better: 1, OPPOSITE[better]: -1}.get(verdict, 0)
            mechanism = name.partition(",")[0]
            start, good_for = _of_page(root, mechanism)
            if start != "yes":
                cosine = number(drift[mechanism]["output_cosine"], 2)
                cosine = "above 0.99" if cosine == "1.00" else cosine
                start = f"{'no; ' if start == 'no' else f'with {start}; by default '}cosine {cosine}"
            link = f"[{name}](../explanations/mechanisms/{mechanism}.md)"
            lines.append((-worth, [link, *cells, *costs.get(name, ["", ""]), start, good_for]))
        return markdown(HEADS, [cells for _, cells in sorted(lines, key=lambda line: line[0])])

    def confirmed(part: str) -> str:
        """The mechanisms whose difference to softmax holds on their further seeds alone, from the best to the worst."""
        metric, _, _, better = PARTS[part]
        further = folder.folder(f"{part}_more").comparison.summary
        found = [row for row in further if (row.metric, row.reference) == (metric, "softmax")]
        found = [row for row in found if row.verdict in OPPOSITE and not row.config.startswith("softmax ")]
        found.sort(key=lambda row: row.difference, reverse=better == "higher")
        return in_turn(f"`{row.config}`" for row in found)

    return {**parts, "which": which, "confirmed": confirmed}
