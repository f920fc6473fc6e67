"""The space of a search: drawn values and errors in the file."""

from math import log

import pytest

from raytrec.common.errors import ConfigError
from raytrec.config.models.base import MODELS
from raytrec.config.run_config import load_config
from raytrec.tuning.space import Space

SPACE_TEXT = """\
# learning rates
optim.embeddings.lr: {log_uniform: [1e-3, 0.1]}
optim.dense.lr: {uniform: [0, 0.5]}

model.cross_layers: {integer: [1, 4]}
data.global_batch_size: {choice: [512, 1024]}
"""


def parse_space(text):
    return Space.parse(text, "space.yaml")


def test_drawn_values_cover_their_ranges():
    drawn = parse_space(SPACE_TEXT).configurations(400, seed=0)
    rates = [each["optim.embeddings.lr"] for each in drawn]
    assert all(1e-3 <= rate <= 0.1 for rate in rates)
    shares = [sum(rate < bound for rate in rates) / 400 for bound in (10**-2.5, 1e-2, 10**-1.5)]
    assert shares == pytest.approx([0.25, 0.5, 0.75], abs=0.07)  # equally many in each half decade
    assert abs(sum(map(log, rates)) / 400 - log(1e-2)) < 0.15
    plain = [each["optim.dense.lr"] for each in drawn]
    assert 0 <= min(plain) < 0.01 and 0.49 < max(plain) <= 0.5 and len(set(plain)) > 350
    assert {each["model.cross_layers"] for each in drawn} == {1, 2, 3, 4}
    assert {each["data.global_batch_size"] for each in drawn} == {512, 1024}
    assert all(float(f"{rate:.4g}") == rate for rate in rates)


def test_draws_do_not_depend_on_trial_count_or_other_keys():
    few, many = (parse_space(SPACE_TEXT).configurations(5, seed=3), parse_space(SPACE_TEXT).configurations(50, seed=3))
    assert few == many[:5] and few != parse_space(SPACE_TEXT).configurations(5, seed=4)
    without = parse_space(SPACE_TEXT.replace("model.cross_layers: {integer: [1, 4]}", "")).configurations(5, seed=3)
    assert [each.items() >= other.items() for each, other in zip(few, without, strict=True)] == [True] * 5


def test_small_space_is_enumerated_once_in_seeded_order():
    text = "a.b: {choice: [x, y]}\nc.d: {integer: [1, 3]}"
    drawn = parse_space(text).configurations(10, seed=0)
    assert sorted((each["a.b"], each["c.d"]) for each in drawn) == [(a, c) for a in "xy" for c in (1, 2, 3)]
    assert parse_space(text).configurations(4, seed=0) == drawn[:4]
    assert any(parse_space(text).configurations(10, seed=seed) != drawn for seed in range(1, 5))


@pytest.mark.parametrize(
    "text, line, mistake",
    [
        ("optim.dense.lr: 0.1", 1, "is not a distribution"),
        ("\noptim.dense.lr: {uniform: [0, 1], choice: [1]}", 2, "is not a distribution"),
        ("x.y: {choice: [1]}\noptim.dense.lr: {loguniform: [1, 2]}", 2, "did you mean 'log_uniform'?"),
        ("optim.dense.lr: {uniform: [1, 0]}", 1, "requires two different numbers, the lower first (got [1, 0])"),
        ("optim.dense.lr: {uniform: [1]}", 1, "uniform requires two finite numbers (got [1])"),
        ("optim.dense.lr: {uniform: [a, 2]}", 1, "requires two finite numbers (got ['a', 2])"),
        ("optim.dense.lr: {uniform: [0, .inf]}", 1, "uniform requires two finite numbers"),
        ("optim.dense.lr: {uniform: [false, true]}", 1, "uniform requires two finite numbers"),
        ("optim.dense.lr: {log_uniform: [0, 1]}", 1, "requires a lower bound above 0 (got [0, 1])"),
        ("train.epochs: {integer: [1, 2.5]}", 1, "integer requires two whole numbers (got [1, 2.5])"),
        ("train.epochs: {choice: []}", 1, "choice requires a list of values (got [])"),
        ("train.epochs: {choice: [1, 2, 1]}", 1, "contains a duplicate value (got [1, 2, 1])"),
        ("# a\n\nrun.name: {choice: [a]}", 3, "run.name cannot be searched"),
        ("train: {choice: [{}]}", 1, "train cannot be searched"),
        ("tracking.uri: {choice: [a]}", 1, "tracking.uri cannot be searched"),
        ("data.valid: {choice: [a]}", 1, "data.valid cannot be searched"),
        ("data.holdout: {choice: [0.1, 0.2]}", 1, "data.holdout cannot be searched"),
        (
            "optim.dense.lr: {choice: [1]}\noptim: {choice: [{}]}",
            1,
            "is part of optim, which is drawn in space.yaml, line 2",
        ),
    ],
)
def test_space_error_names_key_and_line(text, line, mistake):
    with pytest.raises(ConfigError) as error:
        parse_space(text)
    assert mistake in error.value.what and error.value.where == f"space.yaml, line {line}"
    assert error.value.expected


@pytest.mark.parametrize("text", ["", "[]", "a: b: c", "a: 1\na: 2"])
def test_space_without_keys_is_refused(text):
    with pytest.raises(ConfigError, match=r"no keys|cannot parse the YAML"):
        parse_space(text)


def test_unreadable_space_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        Space.read(str(tmp_path / "space.yaml"))
    (tmp_path / "space.yaml").write_bytes(b"a.b: {choice: [\xff]}")
    with pytest.raises(ConfigError, match="not UTF-8"):
        Space.read(str(tmp_path / "space.yaml"))
    (tmp_path / "space.yaml").write_text(SPACE_TEXT)
    assert len(Space.read(str(tmp_path / "space.yaml")).draws) == 4


def test_drawn_values_are_set_in_the_configuration():
    tasks = [{"label": "clicked"}, {"name": "buy", "label": "bought"}]
    config = load_config({"tasks": tasks, "data": {"train": "d"}})
    drawn = config.with_overrides({"optim.dense.lr": 0.5, "tasks.buy.weight": 0.1, "tasks.clicked.weight": 0.2})
    assert drawn.optim.dense.lr == 0.5 != config.optim.dense.lr
    assert [task.weight for task in drawn.tasks] == [0.2, 0.1]
    mistakes = {"tasks.by.weight": "did you mean 'buy'", "data.train.x": "a value", "tasks.x": "no keys"}
    for key, mistake in mistakes.items():
        with pytest.raises(ConfigError, match=mistake):
            config.with_overrides({key: 1})


@pytest.mark.parametrize("name", MODELS.parts)
def test_trial_config_keeps_the_model_type(name):
    kind = MODELS.parts[name]
    fields = {key: field for key, field in kind.model_fields.items() if field.is_required()}
    keys = {key: ["x"] if "list" in str(field.annotation) else "x" for key, field in fields.items()}
    keys |= {"towers": {"query": ["user"], "item": ["item"]}} if name == "two_tower" else {}
    config = load_config({"data": {"train": "d"}, "model": keys | {"name": name}})
    assert type(config.with_overrides({"optim.dense.lr": 0.5}).model) is kind
