"""Checks of a run: built-in checks with their settings, and checks of checks.custom."""

import pytest

from raytrec.checks.live.outcome import Check, Outcome
from raytrec.checks.live.registry import CHECKS, check, list_builtin_checks, make_stop_error, select_enabled_checks
from raytrec.common.errors import ConfigError
from raytrec.config.run_config import load_config
from raytrec.config.training import ChecksSection
from raytrec.config.trust import find_foreign_code, list_user_code

NOT_CHECKS = {"every_steps", "at_checkpoints", "custom"}


@check("steady")
class Steady(Check):
    do = "look at RUN"


@check("shards")
class Shards(Check):
    """A custom check with the name of a built-in check."""


class Nameless(Check):
    pass


def make_config(**checks):
    return load_config({"data": {"train": "unused"}, "checks": checks, "run": {"dir": "runs/a"}})


def make_custom_config(name, reaction="warn"):
    return make_config(custom={f"{__name__}:{name}": reaction})


def test_settings_match_builtin_checks():
    names = [setting for setting in ChecksSection.model_fields if setting not in NOT_CHECKS]
    assert [one.name for one in list_builtin_checks()] == names == list(select_enabled_checks(make_config()))
    assert CHECKS.parts.keys() == set(names), "custom checks of these tests are not registered as built-in"


def test_disabled_checks_are_not_chosen():
    assert "replicas" not in select_enabled_checks(make_config(replicas="off")) and "replicas" in select_enabled_checks(
        make_config()
    )
    assert list(select_enabled_checks(make_config(custom={"no_such_module:Check": "off"}))) == list(
        select_enabled_checks(make_config())
    )


def test_custom_check_runs_last_with_its_own_reaction():
    chosen = select_enabled_checks(make_custom_config("Steady"))
    assert list(chosen)[-1] == "steady" and chosen["steady"].check is Steady
    failed = [Outcome(check="steady", step=7, passed=False, figure=None, limit=None, text="it sways")]
    assert make_stop_error(failed, make_custom_config("Steady")) is None, "it only warns"
    error = make_stop_error(failed, make_custom_config("Steady", "stop"))
    assert error.what == "a check failed: it sways" and error.where == "step 7, steady"
    assert error.do == f"look at runs/a. Set checks.custom: {{{__name__}:Steady: warn}} to continue after a failure"


@pytest.mark.parametrize(
    "name,text",
    [
        ("Nameless", "is not a check"),
        ("NOT_CHECKS", "is not a check"),
        ("Gone", "the module has no attribute 'Gone'"),
        ("Shards", "two checks have the name shards"),
    ],
)
def test_invalid_custom_check_is_rejected(name, text):
    with pytest.raises(ConfigError, match=text) as error:
        select_enabled_checks(make_custom_config(name))
    assert error.value.where == "checks.custom"


@pytest.mark.parametrize("custom", [{"Steady": "stop"}, {"a.b:": "stop"}, {"a:B": "maybe"}, ["a:B"]])
def test_invalid_custom_check_setting_is_rejected(custom):
    with pytest.raises(ConfigError, match=r"checks\.custom"):
        make_config(custom=custom)


def test_custom_check_counts_as_user_code():
    values = make_custom_config("Steady").model_dump(by_alias=True)
    assert list_user_code(values) == [f"{__name__}:Steady"] == list(find_foreign_code(values).values())
    assert list_user_code(make_config().model_dump(by_alias=True)) == []
