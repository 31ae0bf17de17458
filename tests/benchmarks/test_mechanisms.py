"""The benchmark of mechanisms, at sizes that take no time."""

from benchmarks import mechanisms
from benchmarks.rpc import Case


def test_every_ratio_of_a_mechanism_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(
        mechanisms, "CASES", (Case("tiny", (1, 2, 8, 8), False, 1), Case("past", (1, 2, 8, 8), True, 1))
    )
    monkeypatch.setattr(mechanisms, "steps", lambda names: dict.fromkeys(names, "1.00"))
    mechanisms.main(["--threads", "1", "--only", "gated", "neutreno", "sinkhorn"])
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in said] == [
        *(["tiny", name] for name in ("gated", "neutreno", "sinkhorn")),
        *(["past", name] for name in ("gated", "neutreno")),
    ]
    assert all(float(ratio) > 0 for line in said for ratio in line.split()[2:4])


def test_a_training_step_has_the_mechanism(monkeypatch):
    monkeypatch.setattr(mechanisms, "STEP", (1, 1))
    assert set(mechanisms.steps(["sink"])) == {"sink"}
