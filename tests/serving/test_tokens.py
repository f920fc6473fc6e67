"""Tokens of services in files of the user."""

import pytest

from raytrec.common.errors import ConfigError, RunError
from raytrec.serving.options import TOKEN, find_token, read_token


def test_token_that_cannot_be_stored_is_reported(tmp_path, monkeypatch):
    (tmp_path / "home").touch()  # a file instead of a folder
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.delenv(TOKEN, raising=False)
    with pytest.raises(RunError, match="the token of service films cannot be stored or read: ") as error:
        read_token("films")
    assert f"or set {TOKEN}" in error.value.do
    monkeypatch.setenv(TOKEN, "secret")
    assert read_token("films") == "secret"


@pytest.mark.parametrize("name", ["a/b", "../films", "a\0b", "\x1b[2J", "\ud800"])
def test_unsafe_names_of_services_are_rejected(name, monkeypatch):
    monkeypatch.delenv(TOKEN, raising=False)
    for function in (read_token, find_token):
        with pytest.raises(ConfigError, match="is not a valid name of a service"):
            function(name)
