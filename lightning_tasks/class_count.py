"""How many classes a task's model gets, from the task's argument and the data."""

from __future__ import annotations

from typing import Any


def class_count(task: str, given: int | None, datamodule: Any) -> int:
    """The number that was given to a task, or else the data module's.

    Raises:
        ValueError: if neither is known, or the data has more classes than were given.
    """
    found = getattr(datamodule, "num_classes", None)
    if given is None and found is None:
        raise ValueError(
            f"the number of classes is unknown: give {task}(num_classes=...), or fit with a data module that has "
            f"num_classes after setup (got {type(datamodule).__name__})"
        )
    if given is not None and found is not None and found > given:
        raise ValueError(
            f"num_classes={given} is below the {found} classes of the data module; leave it out, or give {found}"
        )
    return given or int(found)  # type: ignore[arg-type]
