"""Every task and every callback on two processes, with one sample and with an odd number, against one process."""

import csv
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.lightning_tasks.processes.process_cases import KINDS, main, tasks
from tests.lightning_tasks.programs import made_once, run_program, run_ranks

pytestmark = pytest.mark.costly


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    def make(folder):
        torch.save(main(folder, 1), folder / "result.pt")

    folder = made_once(tmp_path_factory, "one_process", make)
    return {"folder": folder, **read(folder / "result.pt")}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What each of two processes found."""

    def make(folder):
        run_ranks("tests.lightning_tasks.processes.process_cases", str(folder), "2")

    folder = made_once(tmp_path_factory, "two_processes", make)
    return [{"folder": folder, **read(folder / f"result_{rank}.pt")} for rank in range(2)]


def read(path):
    return torch.load(path, weights_only=True)


def evaluated(found, *prefixes):
    return {name: value for name, value in found["logged"].items() if name.startswith(prefixes or ("val/", "test/"))}


def check(found, expected, *prefixes):
    logged = evaluated(expected, *prefixes)
    assert logged
    assert evaluated(found, *prefixes) == pytest.approx(logged, rel=2e-5, abs=1e-6)


def check_weights(found, expected):
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight.detach(), rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_metrics_of_an_odd_split_and_weights_are_those_of_one_process_at_twice_the_batch(one, two, kind):
    for found in two:
        check(found[f"{kind}, three"], one[f"{kind}, three"])
        check_weights(found[f"{kind}, three"], one[f"{kind}, three"])


@pytest.mark.parametrize("kind", KINDS)
def test_one_sample_is_trained_on_evaluated_and_watched_as_by_one_process(one, two, kind):
    for found in two:
        check(found[f"{kind}, one"], one[f"{kind}, one"])
        check_weights(found[f"{kind}, one"], one[f"{kind}, one"])


@pytest.mark.parametrize("case", ["one", "frozen", "1 batches"])
def test_callbacks_on_a_module_that_knows_nothing_of_us(one, two, case):
    prefixes = ("val/attention", "val/lipschitz", "val/pursuit")
    for found in two:
        check(found[f"module, {case}"], one[f"module, {case}"], *prefixes)
        check_weights(found[f"module, {case}"], one[f"module, {case}"])


def test_processes_may_have_different_numbers_of_batches(one, two):
    """Two and one. (Lipschitz constants and pursuit are of the first batch of each process.)"""
    names = {name for name in evaluated(one["module, 3 batches"], "val/") if name != "val/loss"}
    for found in two:
        check(found["module, 3 batches"], one["module, 3 batches"], "val/attention")
        assert names <= evaluated(found["module, 3 batches"], "val/").keys()


def test_what_was_predicted_is_in_one_table(one, two):
    for kind in ("images", "text", "masks"):
        tables = []
        for folder in (one["folder"], two[0]["folder"]):
            with (folder / f"{kind}_predicted" / "run" / "predictions.csv").open() as file:
                tables.append(list(csv.DictReader(file)))
        assert tables[0] == tables[1]
        assert [row["index"] for row in tables[1]] == ["0", "1", "2"]


def test_robustness_on_two_processes_is_refused_in_words(two):
    for found in two:
        assert "test with trainer.devices=1" in found["refused"]


def check_tasks(folder, processes):
    expected = tasks(folder / "one", 1)
    for rank in range(processes):
        found = read(folder / f"result_{rank}.pt")
        for kind in expected:
            check(found[kind], expected[kind])
            check_weights(found[kind], expected[kind])


@pytest.mark.slow
def test_four_processes(tmp_path):
    run_program("-m", "tests.lightning_tasks.processes.process_cases", str(tmp_path), "4", "1")
    check_tasks(tmp_path, 4)


@pytest.mark.slow
def test_torchrun_with_two_nodes_on_this_machine(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])

    def node(rank):
        started = ("--nnodes", "2", "--node_rank", str(rank), "--nproc_per_node", "1")
        there = ("--master_addr", "127.0.0.1", "--master_port", port)
        program = ("-m", "tests.lightning_tasks.processes.process_cases", str(tmp_path), "1", "2")
        return run_program("-m", "torch.distributed.run", *started, *there, *program)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(node, range(2)))
    check_tasks(tmp_path, 2)
