"""Registries find parts in the files of a package, and by module:name."""

import sys

import pytest

from raytrec.common.errors import ConfigError
from raytrec.common.registry import Registry


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """Create a package with a registry and two files of parts."""
    package = tmp_path / "sweets_of_mine"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from raytrec.common.registry import Registry\nsweet = Registry('sweet', __name__)\n"
    )
    for name in ("toffee", "fudge"):
        text = f"from sweets_of_mine import sweet\n\n@sweet('{name}')\nclass Sweet: ...\n"
        (package / f"{name}.py").write_text(text)
    (tmp_path / "elsewhere_sweets.py").write_text(
        "from sweets_of_mine import sweet\n\n@sweet('fudge')\nclass Nougat: ...\n"
    )
    (tmp_path / "broken_sweets.py").write_text("import os\nos.there_is_no_such_name\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import sweets_of_mine

    yield sweets_of_mine.sweet
    for name in [name for name in sys.modules if "sweets" in name]:
        del sys.modules[name]


def test_registry_finds_parts_in_package_files(parts):
    assert list(parts.parts) == ["fudge", "toffee"]
    assert parts.find("toffee", "bag").__module__ == "sweets_of_mine.toffee"


def test_registry_finds_user_parts_by_path(parts):
    assert parts.find("elsewhere_sweets:Nougat", "bag").__name__ == "Nougat"
    assert list(parts.parts) == ["fudge", "toffee"]


@pytest.mark.parametrize(
    "name,message",
    [
        ("tofee", "there is no sweet 'tofee'; did you mean 'toffee'?"),
        ("tofee", "fudge, toffee, or module:name"),
        ("elsewhere_sweets:Nugat", "sweet elsewhere_sweets:Nugat: the module has no attribute 'Nugat'; did"),
        ("no_such_sweets:Nougat", "no module named 'no_such_sweets'"),
    ],
)
def test_registry_rejects_unknown_names(parts, name, message):
    with pytest.raises(ConfigError) as error:
        parts.find(name, "bag")
    assert message in str(error.value) and "where:    bag" in str(error.value)


def test_registry_propagates_errors_of_user_modules(parts):
    with pytest.raises(AttributeError, match="there_is_no_such_name"):
        parts.find("broken_sweets:Nougat", "bag")


def test_registry_rejects_duplicate_names():
    registry = Registry("sweet", __name__)
    one = type("One", (), {})
    assert registry("fudge")(one) is one and registry("fudge")(one) is one
    with pytest.raises(ValueError, match="sweet fudge is registered twice"):
        registry("fudge")(type("Two", (), {}))
