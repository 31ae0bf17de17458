"""Memory of a training loader by the size of its data: an epoch over tokens, and over a folder of small images.

python -m tests.reliability.loader_memory [--tokens 1000000 10000000] [--images 20000 200000]

Each size runs in a process of its own, on prepared data. `own` is what the process holds for itself (RssAnon) at the
end of an epoch, less what it held before it set up; mapped files are the system's to keep or drop.
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def own_memory() -> float:
    """Megabytes that this process holds for itself."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1e3
    raise OSError("/proc/self/status names no RssAnon")


def write_text(folder: Path, tokens: int) -> None:
    """WikiText's layout with so many words of a thousand."""
    import pyarrow
    import pyarrow.parquet as parquet

    place = folder / "wikitext" / "wikitext-2-v1"
    place.mkdir(parents=True)
    line = " ".join(f"w{(7 * index) % 997}" for index in range(99)) + " \n"  # and <eos>
    for split, count in (("train", tokens), ("validation", 10_000), ("test", 10_000)):
        rows = {"text": pyarrow.array([line] * (count // 100))}
        parquet.write_table(pyarrow.table(rows), place / f"{split}-00000-of-00001.parquet")


def write_images(folder: Path, count: int) -> None:
    """Class folders with so many images of 8 by 8 pixels."""
    from PIL import Image

    content = io.BytesIO()
    Image.new("RGB", (8, 8), (9, 80, 200)).save(content, "PNG")
    for split, images in (("train", count), ("val", 10)):
        for label in range(10):
            place = folder / "imagenet" / split / f"class_{label}"
            place.mkdir(parents=True)
            for index in range(images // 10):
                (place / f"{index:06d}.png").write_bytes(content.getvalue())


def measure(kind: str, folder: Path, size: int) -> None:
    """Print the memory of an epoch of the loader over what lies in `folder`."""
    import torch
    from attnswap.datamodules import ImageNetDataModule, WikiTextDataModule

    torch.set_num_threads(1)
    make = {
        "tokens": lambda: WikiTextDataModule(root=folder, num_tokens=256, batch_size=64, cache_dir=folder / "cache"),
        "images": lambda: ImageNetDataModule(root=folder, batch_size=256, num_workers=0, img_size=8),
    }
    make[kind]().prepare_data()
    before, begin = own_memory(), time.monotonic()
    data = make[kind]()
    data.setup()
    loader = iter(data.train_dataloader())
    seen = len(next(loader)[0])
    started = own_memory() - before
    for batch in loader:
        seen += len(batch[0])
    text = (
        f"{kind}: {size:,}, {seen:,} {'windows' if kind == 'tokens' else 'images'} in {time.monotonic() - begin:.0f} s"
    )
    print(f"{text}; own {started:.1f} MB at the first batch, {own_memory() - before:.1f} MB at the last", flush=True)


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="*", default=[1_000_000, 10_000_000])
    parser.add_argument("--images", type=int, nargs="*", default=[20_000, 200_000])
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        kind, folder, size = options.one
        measure(kind, Path(folder), int(size))
        return
    asked = [("tokens", size, write_text) for size in options.tokens]
    asked += [("images", size, write_images) for size in options.images]
    for kind, size, write in asked:
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), size)
            command = [sys.executable, "-m", __spec__.name, "--one", kind, folder, str(size)]
            subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


if __name__ == "__main__":
    main()
