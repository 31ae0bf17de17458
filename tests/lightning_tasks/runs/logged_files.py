"""What loggers wrote, read back from their files: TensorBoard's events, and an offline run of W&B's."""

import json
import struct
import time

import pytest

BLOCK, HEAD = 32768, 7  # of a LevelDB log, which W&B's file is after its own first seven bytes


def tensorboard_events(folder):
    """The events of a TensorBoard folder, loaded whole."""
    module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = module.EventAccumulator(str(folder), size_guidance={"images": 0, "histograms": 0, "scalars": 0})
    return events.Reload()


def log_entries(data):
    """The entries of a LevelDB log, whose parts never cross a block."""
    place, entry = HEAD, b""
    while place + HEAD <= len(data):
        if BLOCK - place % BLOCK < HEAD:
            place += BLOCK - place % BLOCK
            continue
        size, kind = struct.unpack("<HB", data[place + 4 : place + HEAD])
        if place + HEAD + size > len(data):  # it is being written
            return
        entry += data[place + HEAD : place + HEAD + size]
        place += HEAD + size
        if kind in (1, 4):  # whole, or its last part
            yield entry
            entry = b""


def offline_runs(folder):
    """The records of each offline run of W&B's below a folder, in the order of their files."""
    pytest.importorskip("wandb")
    until = time.monotonic() + 10.0
    while True:
        runs = [read_offline(path) for path in sorted(folder.rglob("offline-run-*/run-*.wandb"))]
        if all(map(is_whole, runs)) or time.monotonic() > until:
            return runs
        time.sleep(0.1)


def is_whole(records):
    """Whether the record that W&B writes at the end of a run is there."""
    return any(record.WhichOneof("record_type") == "exit" for record in records)


def read_offline(path):
    """The records of an offline run."""
    from wandb.proto import wandb_internal_pb2

    records = []
    for entry in log_entries(path.read_bytes()):
        records.append(wandb_internal_pb2.Record())
        records[-1].ParseFromString(entry)
    return records


def run_record(records):
    """What W&B calls a run: id, display_name, run_group, tags, project."""
    return [record.run for record in records if record.WhichOneof("record_type") == "run"][-1]


def rows_and_updates(records):
    """(history, config) of an offline run: the rows it logged in order, and the updates of its configuration."""
    history, config = [], []
    for record in records:
        rows = {"history": record.history.item, "config": record.config.update}
        for kind, kept in (("history", history), ("config", config)):
            if record.WhichOneof("record_type") == kind:
                names = [item.key or "/".join(item.nested_key) for item in rows[kind]]
                kept.append(dict(zip(names, [json.loads(item.value_json) for item in rows[kind]], strict=True)))
    return history, config


def final_config(records):
    """The configuration that an offline run ends with."""
    first = {item.key: json.loads(item.value_json) for item in run_record(records).config.update}
    return {key: value for update in [first, *rows_and_updates(records)[1]] for key, value in update.items()}


def wandb_records(folder):
    """(history, config) of the one offline run of a folder."""
    (records,) = offline_runs(folder)
    return rows_and_updates(records)
