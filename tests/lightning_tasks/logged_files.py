"""What loggers wrote, read back from their files: TensorBoard's events, and an offline run of W&B's."""

import json

import pytest


def tensorboard_events(folder):
    """The events of a TensorBoard folder, loaded whole."""
    module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = module.EventAccumulator(str(folder), size_guidance={"images": 0, "histograms": 0, "scalars": 0})
    return events.Reload()


def wandb_history(folder):
    """The rows that an offline run logged, in order, as dictionaries."""
    store = pytest.importorskip("wandb.sdk.internal.datastore")
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    reader = store.DataStore()
    reader.open_for_scan(str(path))
    rows = []
    while (data := reader.scan_data()) is not None:
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            rows.append(
                {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            )
    return rows
