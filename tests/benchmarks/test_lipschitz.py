import csv

from benchmarks import common, lipschitz


def test_both_agree_and_a_table_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(lipschitz, "CASES", (lipschitz.Case(2, 3, 8, 2),))
    lipschitz.main(["--repeats", "1", "--print_only"])
    assert not any(tmp_path.iterdir())
    assert "published / ours" in capsys.readouterr().out
    lipschitz.main(["--repeats", "1"])
    with (tmp_path / "lipschitz.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert row["converged"] == row["published: converged"] == "2 of 2"
    assert float(row["largest relative difference"]) < 1e-3
    assert float(row["published / ours"]) > 0
