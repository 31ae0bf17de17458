"""Random images in the layouts of the real data sets, for tests."""

from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image


def random_pixels(count: int, size: int, seed: int = 0) -> np.ndarray:
    """`[count, size, size, 3]` uint8."""
    return np.random.default_rng(seed).integers(0, 256, (count, size, size, 3), dtype=np.uint8)


def encoded(pixels: np.ndarray, kind: str = "PNG") -> bytes:
    buffer = BytesIO()
    Image.fromarray(pixels).save(buffer, format=kind)
    return buffer.getvalue()


def write_class_folders(folder: Path, counts: dict[str, int], size: int = 20) -> None:
    """JPEG files in a folder per class."""
    for place, (name, count) in enumerate(counts.items()):
        (folder / name).mkdir(parents=True)
        for index, pixels in enumerate(random_pixels(count, size, place)):
            (folder / name / f"{name}_{index}.JPEG").write_bytes(encoded(pixels, "JPEG"))


def write_parquet(
    folder: Path,
    split: str,
    count: int,
    *,
    image: str = "image",
    size: int = 32,
    classes: int = 10,
    names: list[str] | None = None,
    **changed: dict[int, object],
) -> np.ndarray:
    """One parquet file of the hub's layout, labels 0, 1, 2, ... in turn; returns the pixels."""
    folder.mkdir(parents=True, exist_ok=True)
    pixels = random_pixels(count, size)
    cells = [
        {
            "bytes": changed.get("content", {}).get(index, encoded(pixels[index])),
            "path": changed.get("path", {}).get(index, f"{index}.png"),
        }
        for index in range(count)
    ]
    labels = [changed.get("label", {}).get(index, index % classes) for index in range(count)]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table({image: pa.array(cells, kind), "label": pa.array(labels, pa.int64())})
    if names is not None:
        import json

        features = {image: {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, folder / f"{split}-00000-of-00001.parquet")
    return pixels
