"""Preparation of a search: drawn values of trials, and refused keys with their lines."""

import json
from contextlib import nullcontext
from dataclasses import replace

import parquet
import pytest
from searches import make_settings

from raytrec.common.errors import ConfigError, DataError, RunError
from raytrec.common.reading import parse_yaml
from raytrec.config.run_config import load_config
from raytrec.driver.prepare import resolve
from raytrec.metrics.registry import METRICS
from raytrec.metrics.selection import Selection
from raytrec.tuning import runner
from raytrec.tuning.folder import find_matching_search, is_search, reopen_search, write_search
from raytrec.tuning.search import State, make_trial_config, prepare_search
from raytrec.tuning.space import Space
from raytrec.tuning.tune import tune

TRIAL_KEYS = ("state", "values", "error")
SPACE = "optim.dense.lr: {log_uniform: [0.001, 0.1]}\nmodel.dropout: {uniform: [0, 0.5]}\n"


def make_config_values(data, tmp_path, **changes):
    """Return configuration values; `changes` are section__key=value or whole sections."""
    whole = {key: changes.pop(key) for key in list(changes) if "__" not in key}
    return parquet.config_values(data, tmp_path / "s", train__eval_every_steps=2, **changes) | whole


def prepare_test_search(data, tmp_path, space=SPACE, settings=None, **changes):
    """Prepare a search with these configuration values."""
    config = resolve(load_config(make_config_values(data, tmp_path, **changes)), "own.yaml", "tune")
    return prepare_search(config, Space.parse(space, "space.yaml"), settings or make_settings(trials=3))


def test_trials_have_drawn_values_and_separate_folders(tiny_data, tmp_path):
    search = prepare_test_search(tiny_data, tmp_path)
    assert [trial.number for trial in search.trials] == [1, 2, 3]
    assert [trial.folder.name for trial in search.trials] == ["trial-001", "trial-002", "trial-003"]
    for trial in search.trials:
        config = trial.config
        assert config.optim.dense.lr == trial.values["optim.dense.lr"]
        assert config.model.dropout == trial.values["model.dropout"]
        assert config.run.dir == str(trial.folder)
        assert (trial.total, trial.rows(2)) == (16, 2 * 128)
    assert search.figure.better in ("higher", "lower")
    again = prepare_test_search(tiny_data, tmp_path)
    assert [t.values for t in again.trials] == [t.values for t in search.trials]
    other = prepare_test_search(tiny_data, tmp_path, settings=make_settings(trials=3, seed=1))
    assert [t.values for t in other.trials] != [t.values for t in search.trials]


@pytest.mark.parametrize(
    "space, line, mistake",
    [
        (SPACE + "optim.dense.lrr: {uniform: [0, 1]}", 3, "did you mean optim.dense.lr"),
        ("optim.dense.lr: {uniform: [-1, 1]}", 1, "optim.dense.lr = -1"),
        ("\nmodel.dropout: {uniform: [0, 2]}", 2, "model.dropout = 2"),
        ("train.epochs: {choice: [1, two]}", 1, "train.epochs = two"),
        ("model.bottom_mlp: {choice: [[16], 16]}", 1, "model.bottom_mlp = 16"),
        ("optim.schedule.decay_steps: {choice: [null, 5]}", 1, "decay is constant"),
        ("plan.tables: {choice: [{}, {nowhere: {ranks: [0]}}]}", 1, "nowhere"),
        ("tasks.x.weight: {uniform: [0.1, 1]}", 1, "tasks"),
        ("data.train.x: {choice: [1]}", 1, "a value"),
    ],
)
def test_invalid_space_error_names_key_and_line(tiny_data, tmp_path, space, line, mistake):
    with pytest.raises(ConfigError) as error:
        prepare_test_search(tiny_data, tmp_path, space)
    assert mistake in error.value.what and error.value.where == f"space.yaml, line {line}"
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    "space", ["data.train: {{choice: [{0}, [{0}]]}}", "data.partitions.to: {{choice: [date=2, date=3]}}"]
)
def test_training_data_is_not_drawn_if_trials_are_compared_on_held_out_rows(tiny_data, tmp_path, space):
    """With data.valid or data.test, all trials are compared on the same rows."""
    space = space.format(tiny_data / "train")
    held_out = {"data__valid": None, "data__test": None, "data__holdout": 0.1}
    with pytest.raises(ConfigError, match="cannot be searched: trials would be compared on different rows") as error:
        prepare_test_search(tiny_data, tmp_path, space, **held_out)
    assert error.value.where == "space.yaml, line 1" and "data.valid" in error.value.do
    if "partitions" not in space:
        for changes in (held_out | {"data__valid": str(tiny_data / "test")}, held_out | {"data__holdout": None}):
            changes["data__test"] = str(tiny_data / "test")
            assert len(prepare_test_search(tiny_data, tmp_path, space, **changes).trials) == 2


def test_invalid_combination_of_drawn_values_is_refused(tiny_data, tmp_path):
    space = "data.lanes: {choice: [1, 6]}\nscaling.num_workers: {choice: [1, 2]}"
    with pytest.raises(ConfigError, match=r"data.lanes = 1: "):  # the configuration has 2 workers
        prepare_test_search(tiny_data, tmp_path, space)
    with pytest.raises(ConfigError, match=r"trial \d \(.*num_workers = 2.*lanes") as error:
        prepare_test_search(tiny_data, tmp_path, space, make_settings(trials=4), scaling__num_workers=1)
    assert "a choice of whole sections" in error.value.do


@pytest.mark.parametrize(
    "changes, error, mistake",
    [
        ({"train": {}}, ConfigError, "train.eval_every_steps is not set"),
        ({"data__train": "/nowhere"}, DataError, "the path does not exist"),
        ({"train__epochs": 0}, ConfigError, "train.epochs"),
        ({"plan__tables": {"none": {"ranks": [0]}}}, ConfigError, "none"),
    ],
)
def test_tune_refuses_an_invalid_configuration(tiny_data, tmp_path, changes, error, mistake):
    (tmp_path / "space.yaml").write_text(SPACE)
    with pytest.raises(error) as found:
        tune(make_config_values(tiny_data, tmp_path, **changes), str(tmp_path / "space.yaml"))
    assert mistake in str(found.value) and not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    "options, mistake",
    [
        ({"metric": "nothing"}, "--metric is nothing, but the tasks have no metric"),
        ({"trials": 0}, "--trials is 0"),
        ({"trials": -1}, "--trials is -1"),
        ({"grace_steps": 0}, "--grace-steps is 0"),
        ({"reduction_factor": 1}, "--reduction-factor is 1"),
        ({"seed": -1}, "--seed is -1"),
        ({"at_once": 0}, "--at-once is 0"),
        ({"space": None}, "a search requires a config and a space"),
        ({"space": "/nowhere.yaml"}, "cannot read the search space: No such file"),
        ({"resume": "/nowhere"}, "--resume cannot be combined with CONFIG"),
        ({"resume": "/nowhere", "metric": "auc", "grace_steps": 0}, "CONFIG, --space, --metric, --grace-steps"),
    ],
)
def test_tune_refuses_invalid_options(tiny_data, tmp_path, options, mistake):
    (tmp_path / "space.yaml").write_text(SPACE)
    given = {"space": str(tmp_path / "space.yaml"), "at_once": 1} | options
    with pytest.raises((ConfigError, RunError)) as error:
        tune(make_config_values(tiny_data, tmp_path), **given)
    assert mistake in str(error.value) and not (tmp_path / "s").exists()


def test_space_is_read_from_the_working_directory(tiny_data, tmp_path, monkeypatch):
    """The working directory of a job contains the submitted configuration and space."""
    (tmp_path / "space.yaml").write_text("optim.dense.lrr: {uniform: [0, 1]}")
    (tmp_path / "root").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAYTREC_ROOT", str(tmp_path / "root"))
    with pytest.raises(ConfigError, match=r"optim\.dense\.lrr"):
        tune(make_config_values(tiny_data, tmp_path), "space.yaml")


def test_tune_selects_the_metric_by_name(tiny_data, tmp_path):
    search = prepare_test_search(tiny_data, tmp_path)
    for figure in Selection.from_config(search.config, search.schema).figures:
        named = prepare_test_search(tiny_data, tmp_path, settings=make_settings(trials=1, metric=figure.key))
        assert named.figure == figure and figure.better == METRICS.parts[figure.key].better


def test_reopened_search_keeps_trial_states_and_values(tiny_data, tmp_path):
    search = prepare_test_search(tiny_data, tmp_path)
    assert not is_search(search.folder)
    write_search(search)
    assert is_search(search.folder) and [t.state for t in search.trials] == [State.WAITING] * 3
    records = json.loads((search.folder / "trials.json").read_text())
    for record, state in zip(records, ("running", "stopped", "running"), strict=True):
        record["state"] = state
    (search.folder / "trials.json").write_text(json.dumps(records))
    for trial in search.trials:
        line = {"kind": "eval", "step": 2, search.figure.key: trial.number / 10}
        (trial.folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (search.trials[2].folder / "result.json").write_text("{}")
    before = {t.folder: (t.folder / "config.yaml").read_text() for t in search.trials}

    again = reopen_search(search.folder, 4, allow_code=False)
    states = [State.INTERRUPTED, State.STOPPED, State.FINISHED, State.WAITING]
    assert [t.state for t in again.trials] == states
    assert [t.points for t in again.trials] == [{2: 0.1}, {2: 0.2}, {2: 0.3}, {}]
    assert [t.values for t in again.trials[:3]] == [t.values for t in search.trials]
    write_search(again)
    assert {folder: (folder / "config.yaml").read_text() for folder in before} == before
    assert (again.trials[3].folder / "config.yaml").exists()
    with pytest.raises(ConfigError, match="the search has 4 trials, more than --trials"):
        reopen_search(search.folder, 2, allow_code=False)
    with pytest.raises(RunError, match="no search in this folder"):
        reopen_search(tmp_path, None, allow_code=False)


@pytest.fixture
def written_search(tiny_data, tmp_path):
    search = prepare_test_search(tiny_data, tmp_path)
    write_search(search)
    return search


@pytest.mark.slow
@pytest.mark.parametrize(
    "change, mistake",
    [
        *((lambda trial, key=key: trial.pop(key), f"cannot be read: 1.{key}: Field required") for key in TRIAL_KEYS),
        (lambda trial: trial.update(state="odd"), "trials.json of the search cannot be read"),
        (lambda trial: trial["values"].pop("model.dropout"), "the recorded values of trial 2 do not match"),
        (lambda trial: trial.update(values=[]), "trials.json of the search cannot be read: 1.values"),
        (lambda trial: trial["values"].update({"model.dropout": "much"}), "trial 2 do not match the search space"),
    ],
)
def test_search_with_a_changed_trial_cannot_be_resumed(written_search, change, mistake):
    file = written_search.folder / "trials.json"
    records = json.loads(file.read_text())
    change(records[1])
    file.write_text(json.dumps(records))
    with pytest.raises(RunError, match=mistake):
        reopen_search(written_search.folder, None, allow_code=False)


@pytest.mark.parametrize("name", ["search.json", "trials.json", "space.yaml", "base/config.yaml"])
@pytest.mark.parametrize("text", [None, "", "{}", "[{}]", "null", '{"settings": {"factor": "x"}}'])
def test_damaged_search_files_raise_a_clear_error(written_search, name, text):
    (written_search.folder / name).unlink()
    if text is not None:
        (written_search.folder / name).write_text(text)
    with pytest.raises((RunError, ConfigError, DataError)):
        reopen_search(written_search.folder, None, allow_code=False)


@pytest.fixture
def own_home(tmp_path, monkeypatch):
    """A folder for the key that marks the user's files."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()


@pytest.mark.slow
def test_resume_refuses_code_in_an_untrusted_search(own_home, written_search):
    search = written_search
    reopen_search(search.folder, None, allow_code=False)
    for folder in (search.trials[1].folder, search.folder / "base"):
        config, mark = folder / "config.yaml", folder / "config.yaml.mark"
        before, sealed = config.read_text(), mark.read_text()
        code = load_config(config)
        code.tasks[0].metrics = ["theirs:Metric"]
        config.write_text(code.to_yaml())
        mark.unlink()
        with pytest.raises(ConfigError, match="names code to run"):
            reopen_search(search.folder, None, allow_code=False)
        config.write_text(before)
        mark.write_text(sealed)
    reopen_search(search.folder, None, allow_code=False)
    mark.unlink()  # without its mark, neither configuration nor space is trusted
    space = search.folder / "space.yaml"
    space.write_text(SPACE + 'model.name: {choice: ["theirs:Net"]}\n')
    with pytest.raises(ConfigError, match="names code to run"):
        reopen_search(search.folder, 4, allow_code=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tasks.bought.metrics", ["theirs:Metric"]),
        ("model", {"name": "theirs:Net"}),
        ("data.train", "s3://b/x?endpoint_override=theirs:9000"),
    ],
)
def test_untrusted_space_and_trials_must_not_draw_code(own_home, tiny_data, tmp_path, key, value):
    tasks = [{"name": "bought"}]
    search = prepare_test_search(tiny_data, tmp_path, tasks=tasks)
    drawn = tmp_path / "drawn.yaml"
    drawn.write_text(json.dumps({key: {"choice": [value]}}))
    with pytest.raises(ConfigError, match="names code to run"):
        tune(make_config_values(tiny_data, tmp_path, tasks=tasks), drawn.as_uri())
    write_search(search)
    trials = search.folder / "trials.json"
    records = json.loads(trials.read_text())
    records[0]["values"][key] = value
    trials.write_text(json.dumps(records))
    with pytest.raises(RunError, match="the recorded values of trial 1 do not match the search space and seed"):
        reopen_search(search.folder, None, allow_code=False)
    (search.folder / "space.yaml").write_text(drawn.read_text())
    with pytest.raises(ConfigError, match="names code to run"):
        reopen_search(search.folder, None, allow_code=False)


def test_repeated_tune_command_finds_its_search(tiny_data, tmp_path):
    given = make_config_values(tiny_data, tmp_path) | {"run": {"root": str(tmp_path)}}
    space, settings = Space.parse(SPACE, "space.yaml"), make_settings(trials=3)

    def new(*overrides):
        return resolve(load_config(given, overrides), "own.yaml", "tune")

    search = prepare_search(new(), space, settings)
    write_search(search)
    later = new("run.name=run-tune-20990101-000000")
    later.run.name = search.config.run.name.rsplit("-", 2)[0] + "-20990101-000000"
    later.run.dir = str(search.folder.parent / later.run.name)
    assert find_matching_search(later, space, settings, named=False) == search.folder
    assert find_matching_search(later, space, settings, named=True) is None
    assert find_matching_search(later, space, replace(settings, seed=1), named=False) is None
    assert find_matching_search(later, Space.parse(SPACE + "# changed", "space.yaml"), settings, named=False) is None
    assert find_matching_search(new("train.epochs=2"), space, settings, named=False) is None
    (search.folder / "outcome.json").write_text("{}")
    assert find_matching_search(later, space, settings, named=False) is None


def test_concurrent_trials_fill_the_cpus(tiny_data, tmp_path, monkeypatch):
    search = prepare_test_search(tiny_data, tmp_path, "data.readers: {choice: [1, 3]}", make_settings(trials=2))
    configs = [trial.config for trial in search.trials]  # 2 workers each: 4 and 8 CPUs
    for processors, places in ((4, 1), (16, 2), (17, 2)):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, processors=processors: set(range(processors)))
        assert runner.allocate_environments(configs, None) == [{}] * places
    assert runner.allocate_environments(configs, 3) == [{}] * 3


def test_concurrent_trials_share_the_gpus_of_a_machine(tiny_data, tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(runner, "get_build_device", lambda: "cuda")
    monkeypatch.setattr(runner, "list_usable_gpus", lambda: ["0", "1", "2", "3", "4"])
    configs = [trial.config for trial in prepare_test_search(tiny_data, tmp_path, scaling__device="auto").trials]

    def places(at_once=None):
        return [place.get("CUDA_VISIBLE_DEVICES") for place in runner.allocate_environments(configs, at_once)]

    assert places() == ["0,1", "2,3"] and places(1) == ["0,1"]
    monkeypatch.setattr(runner, "list_usable_gpus", lambda: ["0"])
    assert places() == ["0"]
    monkeypatch.setattr(runner, "list_usable_gpus", list)
    assert places(2) == [None, None]


def test_concurrent_trials_fill_the_nodes_of_a_cluster(tiny_data, tmp_path, monkeypatch):
    configs = [trial.config for trial in prepare_test_search(tiny_data, tmp_path).trials]  # 2 workers of 2 CPUs each
    for config in configs:
        config.scaling.address, config.scaling.device = "10.0.0.1:6379", "auto"
    nodes = [{"Resources": {"CPU": cpus}} for cpus in (8.0, 3.0, 1.0)]
    monkeypatch.setattr(runner, "list_alive_nodes", lambda: nodes)
    monkeypatch.setattr(runner, "ray_session", lambda address: nullcontext())
    assert runner.allocate_environments(configs, None) == [{}] * 2  # 4 and 1 workers
    nodes[0]["Resources"]["GPU"] = 2.0
    assert runner.allocate_environments(configs, None) == [{}]
    assert runner.allocate_environments(configs, 3) == [{}] * 3


def test_reopened_search_draws_the_same_models(tiny_data, tmp_path):
    space = "model.name: {choice: [dlrm, dcn, deepfm, masknet]}\noptim.schedule.warmup_steps: {choice: [0, 1]}"
    search = prepare_test_search(tiny_data, tmp_path, space, make_settings(trials=8), model={"top_mlp": [8]})
    write_search(search)
    again = reopen_search(search.folder, None, False)
    assert [trial.config for trial in again.trials] == [trial.config for trial in search.trials]
    printed, values = load_config(parse_yaml(search.config.to_yaml())), {"model.name": "deepfm"}
    assert make_trial_config(printed, values, 1) == make_trial_config(search.config, values, 1)
