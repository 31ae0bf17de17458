"""Models made linear: what the swap costs, what healing brings back, and how they write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from docs.pages import tables
from docs.pages.language import Folder
from docs.pages.numbers import markdown, number

SHARES = {"all": "", "3 of 4": " 3 of 4"}


def words(folder: Folder) -> dict[str, Callable[..., Any]]:
    """`converted`, of the language model; `encoder`, of the other; `gap`, what healing left of one's loss."""

    def gap(found: Folder, metric: str, name: str, teacher: str) -> str:
        """The share of what the swap cost that healing left, in percent, of the means over seeds."""
        now, before, goal = (
            float(found.comparison.values(metric, each).mean()) for each in (name, f"{name}, not healed", teacher)
        )
        return number(100 * (now - goal) / (before - goal))

    def converted(*mechanisms: str) -> str:
        """Each mechanism in all layers and in three of four: losses, the gap left, and how the model writes."""
        llama, rows = folder.folder("llama"), []
        speeds = {
            (row["mechanism"], row["layers"]): row
            for row in tables.read(folder.path / "generation.parquet").to_pylist()
        }

        def written(name: str, share: str) -> list[str]:
            row = speeds[name, share]
            return [number(float(row["tokens_per_second"])), f"{int(row['cache_bytes']) / 1024:,.0f}"]

        losses = [llama.mean("test/loss", each, 2) for each in ("teacher", "softmax")]
        rows.append(["none", "softmax", " → ".join(losses), "", "", *written("softmax", "none")])
        for share, end in SHARES.items():
            for name in mechanisms:
                here = f"{name}{end}"
                both = [llama.mean("test/loss", each, 2) for each in (f"{here}, not healed", here)]
                told = llama.told("test/loss", here, "softmax", 2)
                rows.append(
                    [
                        share,
                        name,
                        " → ".join(both),
                        gap(llama, "test/loss", here, "teacher"),
                        told,
                        *written(name, share),
                    ]
                )
        heads = [
            "layers",
            "mechanism",
            "loss",
            "gap left, %",
            "loss minus softmax's, same steps",
            "tokens per s",
            "cache, KiB",
        ]
        return markdown(heads, rows)

    def encoder(*mechanisms: str) -> str:
        """Each mechanism in all layers and in four of six: cosine and probe, before and after healing."""
        minilm, rows = folder.folder("minilm"), []
        for share, end in {"all": "", "4 of 6": " 4 of 6"}.items():
            for name in (f"{each}{end}" for each in mechanisms):
                both = f"{name}, not healed", name
                cosines = [minilm.mean("test/cosine_ag_news", each, 3) for each in both]
                probes = [minilm.mean("test/probe_accuracy", each, 1, 100) for each in both]
                left = gap(minilm, "test/cosine_ag_news", name, "softmax")
                rows.append([share, name.removesuffix(end), " → ".join(cosines), left, " → ".join(probes)])
        return markdown(["layers", "mechanism", "cosine", "gap left, %", "probe, %"], rows)

    return {
        "converted": converted,
        "encoder": encoder,
        "gap": lambda name: gap(folder.folder("llama"), "test/loss", name, "teacher"),
    }
