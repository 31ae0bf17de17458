"""How numbers are written, and what a claim is worth."""

from dataclasses import replace

import pytest

from docs.pages.errors import PageError
from docs.pages.numbers import at_least, interval, listed, mean_std, number, signed, significant
from docs.pages.tables import Table, differences, verdicts
from docs.pages.verdicts import by_count, counted, verdict
from lightning_tasks.compare.summary import ImageInterval, SummaryRow


def test_numbers_are_written_in_one_way():
    assert [number(-1234.56), number(0.00234, 3), number(float("nan"))] == ["−1,234.6", "0.002", "nan"]
    assert [signed(float("nan")), significant(float("nan"))] == ["nan", "nan"]  # a page says it
    assert [at_least(0.99898, 4), at_least(1.0, 4), at_least(-0.01)] == ["0.9989", "1.0000", "−0.1"]
    assert [signed(2.0), signed(-2.0, 0)] == ["+2.0", "−2"]
    assert [significant(each, 2) for each in (0.0, 0.000047, 0.0996, 13.4, 45321.0)] == [
        *("0", "0.000047", "0.10", "13", "45,000")
    ]
    assert interval(-0.0214, 0.0003, 1, 100) == "[−2.1, +0.0]"
    assert [mean_std([1.0, 2.0]), mean_std([1.0])] == ["1.5 ± 0.7", "1.0"]


def test_a_table_says_lower_and_higher_by_the_verdict(toy):
    root, page = toy
    found = page.raw(root).comparison("", str(root / "compare.yaml"))
    table = differences(found, "", {"RPC − softmax": ("rpc", "softmax")}, {"top-1": ("test/top1", 1, 100)})
    assert isinstance(table, Table)
    assert found.row("test/top1", "rpc", "softmax").verdict == "higher"
    assert str(table).splitlines()[2] == "| top-1 | **+2.0 [+2.0, +2.0] (0.0)** |"


def test_intervals_over_images_have_a_column_where_there_are_any(toy):
    root, page = toy
    found = page.raw(root).comparison("", str(root / "compare.yaml"))
    names = {name: name for name in found.configs}
    assert "over images [95%]" not in verdicts(found, "test/top1", names, 1, 100).heads
    drawn = ImageInterval(
        "test/top1", "rpc", "softmax", 100, found.row("test/top1", "rpc", "softmax").pairs, 0.01, 0.03
    )
    table = verdicts(replace(found, images=[drawn]), "test/top1", names, 1, 100)
    place = table.heads.index("over images [95%]")
    shown = {(row[0], row[table.heads.index("compared with")]): row[place] for row in table.rows}
    assert shown.pop(("rpc", "softmax")) == "[+1.0, +3.0]"
    assert {*shown.values()} == {""}
    assert {len(row) for row in table.rows} == {len(table.heads)}


def test_what_a_claim_is_worth_follows_from_the_verdicts():
    def row(**values):
        given = {"pairs": 8, "difference": -1.0, "low": -2.0, "high": -0.1, "detectable": 0.5, "p": 0.01}
        return SummaryRow("m", "a", 8, 0.0, 1.0, "b", **{**given, "corrected": 0.01, **values})

    lower, weak, open_, too_few = row(), row(corrected=0.2), row(p=0.3, corrected=0.9), row(pairs=3)
    assert verdict("lower", lower) == "holds here (lower)"
    assert verdict("higher", lower) == "does not hold here (lower)"
    assert verdict("lower", row(detectable=3.0)) == "not shown here (lower, but budget too small)"
    assert verdict("higher", row(difference=0.0, low=0.0, high=0.0)) == "not shown here (equal)"
    assert verdict("lower", weak) == "not shown here (lower, not after correction)"
    counted = "lower, not after correction: 1 of 2; budget too small: 1 of 2"
    assert verdict("higher", weak, open_) == f"not shown here ({counted})"
    assert verdict("lower", lower, open_) == "not shown here (lower: 1 of 2; budget too small: 1 of 2)"
    assert verdict("lower", too_few) == "not shown here (too few pairs)"
    assert verdict("lower", row(p=0.3, corrected=0.9, within_corrected=0.01)) == "does not hold here (equivalent)"
    with pytest.raises(PageError, match="without a verdict"):
        verdict("lower", SummaryRow("m", "a", 1, 0.0, float("nan")))


def test_intervals_are_counted_where_differences_have_a_spread():
    row = SummaryRow("m", "a", 4, 0.0, 1.0, "b", 4, 0.5, 0.1, 0.9, 0.3, p=0.01, corrected=0.02)
    none, no_spread = replace(row, low=-0.1, corrected=0.2), replace(row, low=0.5, high=0.5)
    assert counted([row, none, no_spread]) == "1 of 3 intervals exclude 0, 1 after the correction"


def test_names_are_listed_however_many_there_are():
    given = [], ["a"], ["a", "b"], ["a", "b", "a", "c"]
    assert [listed(each) for each in given] == ["none", "a", "a and b", "a, b and c"]


def test_a_verdict_without_seeds_follows_what_was_counted():
    assert by_count(3, 3, "intervals that hold 1/2") == "holds here (intervals that hold 1/2: 3 of 3)"
    assert by_count(1, 3, "layers") == "not shown here (layers: 1 of 3)"
    assert by_count(0, 3, "layers") == "does not hold here (layers: 0 of 3)"
    with pytest.raises(PageError, match="counts layers, and there are none"):
        by_count(0, 0, "layers")
