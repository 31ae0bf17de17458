"""What the data modules need; where it is not installed, importing this says how to get it."""

from importlib.util import find_spec

for _name in (
    *("lightning", "torchvision", "timm", "datasets", "pyarrow", "sklearn", "numpy", "PIL", "matplotlib", "tqdm"),
    "filelock",
):
    _spec = find_spec(_name)
    if _spec is None or _spec.origin is None:  # nothing, or a folder without __init__.py, such as one of data
        raise ModuleNotFoundError(
            f"data modules need {_name}, which is not installed: pip install 'attnswap[train]'", name=_name
        )
