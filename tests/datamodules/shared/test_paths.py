from pathlib import Path

import pytest
from attnswap.datamodules.shared.paths import cache_root, data_root


@pytest.mark.parametrize(("function", "variable"), [(data_root, "ATTNSWAP_DATA"), (cache_root, "ATTNSWAP_CACHE")])
class TestRoots:
    def test_argument_beats_variable(self, function, variable, monkeypatch, tmp_path):
        monkeypatch.setenv(variable, str(tmp_path / "variable"))
        assert function(tmp_path / "argument") == tmp_path / "argument"
        assert function(None) == tmp_path / "variable"

    def test_default_is_below_the_users_cache(self, function, variable, monkeypatch, tmp_path):
        monkeypatch.delenv(variable, raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert function(None).parent == tmp_path / "attnswap"

    def test_home_is_expanded(self, function, variable, monkeypatch, tmp_path):
        monkeypatch.setenv("HOME", str(tmp_path))
        assert function("~/here") == tmp_path / "here"

    def test_relative_becomes_absolute(self, function, variable, monkeypatch, tmp_path):
        monkeypatch.chdir(tmp_path)
        assert function("here") == Path.cwd() / "here"

    def test_a_file_is_an_error_that_names_the_cure(self, function, variable, tmp_path):
        file = tmp_path / "file"
        file.touch()
        with pytest.raises(NotADirectoryError, match=rf"{file} is not a folder.*\${variable}"):
            function(file)


def test_data_and_prepared_ids_are_apart_by_default(monkeypatch):
    monkeypatch.delenv("ATTNSWAP_DATA", raising=False)
    monkeypatch.delenv("ATTNSWAP_CACHE", raising=False)
    assert data_root() != cache_root()
