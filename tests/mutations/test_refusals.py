"""2,000 inputs broken by hypothesis: configurations, schemas, run folders and indexes raise clear errors.

The ordinary suite runs a few examples of each kind; `pytest tests/mutations -m mutations` runs all of them.
"""

import json
import warnings
from pathlib import Path

import pytest
import recorded_run
import yaml
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from mutate import (
    MUTATED_VALUES,
    NON_FILE_KINDS,
    MutationFolder,
    RayStartReached,
    draw_changed_bytes,
    draw_changed_values,
    dump_yaml,
    replace_by_kind,
    run_command,
    run_with_watchdog,
    update_index_hash,
)

from raytrec.config.run_config import _iterate_fields

FEW_EXAMPLES, EXAMPLE_PARTS, EXAMPLES_PER_PART = 6, 10, 34  # examples of each of the six kinds: 6, or 10 × 34
INDEX = f"run/checkpoints/step-{recorded_run.STEP:010d}/checkpoint.json"
RUN_FILES = ("config.yaml", "schema.yaml", "driver.json", "plan.json")
RUN_FILES += ("events.jsonl", "metrics.jsonl", "ranks.jsonl")


@pytest.fixture(scope="module")
def mutation_folder(tmp_path_factory):
    """Return the folder of the cases. Commands stop before they start Ray, draw or query a cluster."""
    from raytrec.client import queries
    from raytrec.driver import evaluation
    from raytrec.driver import run as driver

    def reached(*_, **__):
        raise RayStartReached

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = MutationFolder(tmp_path_factory.mktemp("mutations"))
        patch.setattr(driver, "_drive", reached)
        patch.setattr(evaluation, "open_session", reached)
        patch.setattr(queries, "_hosts", dict)
        patch.setattr("raytrec.common.reading.RETRY_DELAYS_S", (0.0, 0.0, 0.0))  # retries of failed reads
        patch.setenv("HOME", str(made.kept.parent))
        patch.delenv("RAYTREC_ROOT", raising=False)
        yield made


def check_config_commands(place, content, overrides=(), name="config.yaml"):
    """Run `config` and `train` with a configuration and check that nothing is written elsewhere."""
    with place.fresh() as work:
        before = place.outside()
        Path(name).write_bytes(content)
        run_command("config", name, *overrides)
        run_command("train", name, *overrides)
        assert place.outside() == before, "files were written outside the working directory"
        return work


def check_config_bytes(place, data):
    check_config_commands(place, data.draw(draw_changed_bytes((place.kept / "config.yaml").read_bytes())))


def check_config_values(place, data):
    values = data.draw(draw_changed_values(place.config()))
    check_config_commands(place, dump_yaml(values))


CONFIG_KEYS = [key.replace("*", "user") for key, _ in _iterate_fields() if key not in ("run.dir", "run.root")]
OVERRIDES = st.lists(st.tuples(st.sampled_from(CONFIG_KEYS), MUTATED_VALUES), min_size=1, max_size=3)


def check_command_line_settings(place, overrides):
    values = ((key, yaml.safe_dump(value, default_flow_style=True)) for key, value in overrides)
    texts = [f"{key}={text.removesuffix('...' + chr(10))}" for key, text in values]
    check_config_commands(place, (place.kept / "config.yaml").read_bytes(), [t for t in texts if "\0" not in t])


def check_schemas(place, data):
    text = (place.kept / "data/schema.yaml").read_text()
    if data.draw(st.booleans()):
        content = dump_yaml(data.draw(draw_changed_values(yaml.safe_load(text))))
    else:
        content = data.draw(draw_changed_bytes(text))
    with place.fresh():
        if data.draw(st.integers(0, 9)) == 0:
            replace_by_kind("data/schema.yaml", data.draw(st.sampled_from(NON_FILE_KINDS)))
        else:
            Path("data/schema.yaml").write_bytes(content)
        run_command("train", "config.yaml")


def check_run_folders(place, data):
    from raytrec.client import queries

    with place.fresh():
        for name in data.draw(st.lists(st.sampled_from(RUN_FILES), min_size=1, max_size=2, unique=True)):
            path = Path("run", name)
            if data.draw(st.integers(0, 4)) == 0:
                replace_by_kind(path, data.draw(st.sampled_from(NON_FILE_KINDS)))
            elif name.endswith(".yaml") and data.draw(st.booleans()):
                values = yaml.safe_load((place.kept / path).read_text())
                path.write_bytes(dump_yaml(data.draw(draw_changed_values(values))))
            elif data.draw(st.booleans()):
                lines = (place.kept / path).read_text().splitlines()
                line = data.draw(st.integers(0, len(lines) - 1))
                try:
                    lines[line] = json.dumps(data.draw(draw_changed_values(json.loads(lines[line]))))
                except ValueError:
                    lines[line] = data.draw(st.text(max_size=30))
                path.write_text("\n".join(lines) + "\n", errors="replace")
            else:
                path.write_bytes(data.draw(draw_changed_bytes((place.kept / path).read_bytes())))
        run_command("train", "--resume", "run")
        run_command("train", "--warm-start", "run", "data.train=data/train")
        run_command("evaluate", "run", "--data", "data/test")
        run_with_watchdog(lambda: read_run_history("run"), "history")
        for call in (lambda: queries.news("./run", {}), lambda: queries.file("./run", "plan.json"), queries.runs):
            run_with_watchdog(call, "queries")


def read_run_history(folder):
    """Read and print a run as `report` and `compare` do, without drawing."""
    from raytrec.report.compare import compare, print_table
    from raytrec.report.report import read_package_versions
    from raytrec.tracking.run_folder import RunFolder, check_run_folder

    found = RunFolder.read(check_run_folder(folder))
    print(found.name, found.config, found.tables, found.restarts, read_package_versions(Path(folder)))
    print_table(compare([folder, folder]))


def check_indexes(place, data):
    from raytrec.checkpoint.storage import load
    from raytrec.client import queries

    text = (place.kept / INDEX).read_bytes()
    with place.fresh():
        if data.draw(st.integers(0, 9)) == 0:
            name = data.draw(st.sampled_from([INDEX, INDEX.replace("checkpoint.json", "a-00000.bin")]))
            replace_by_kind(name, data.draw(st.sampled_from(NON_FILE_KINDS)))
        elif data.draw(st.booleans()):
            Path(INDEX).write_bytes(data.draw(draw_changed_bytes(text)))
        else:
            values = data.draw(draw_changed_values(json.loads(text)))
            Path(INDEX).write_bytes(update_index_hash(json.dumps(values, default=str)))
        run_command("train", "--resume", "run")
        run_command("train", "--warm-start", "run", "data.train=data/train")
        run_command("evaluate", str(Path(INDEX).parent), "--data", "data/test")
        for call in (lambda: queries.tables("./run"), lambda: queries.rows("./run", "user", [0, 39])):
            run_with_watchdog(call, "queries")
        run_with_watchdog(lambda: load(str(Path(INDEX).parent), recorded_run.make_tensors()), "load")


CASES = {
    "config bytes": (check_config_bytes, {"data": st.data()}),
    "config values": (check_config_values, {"data": st.data()}),
    "command line settings": (check_command_line_settings, {"overrides": OVERRIDES}),
    "schemas": (check_schemas, {"data": st.data()}),
    "run folders": (check_run_folders, {"data": st.data()}),
    "checkpoint indexes": (check_indexes, {"data": st.data()}),
}


def check_examples(kind, mutation_folder, first_seed, count, phases):
    case, strategies = CASES[kind]
    how = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
    seed(first_seed)(settings(max_examples=count, phases=phases, **how)(given(**strategies)(case)))(mutation_folder)


@pytest.mark.parametrize("kind", CASES)
def test_mutated_input_is_handled(mutation_folder, kind):
    check_examples(kind, mutation_folder, 0, FEW_EXAMPLES, [Phase.generate])


@pytest.mark.mutations
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(EXAMPLE_PARTS))
@pytest.mark.parametrize("kind", CASES)
def test_mutated_input_is_handled_in_all_examples(mutation_folder, kind, part):
    check_examples(kind, mutation_folder, part + 1, EXAMPLES_PER_PART, [Phase.generate, Phase.shrink])


@pytest.mark.slow
def test_valid_input_reaches_the_start_of_ray(mutation_folder):
    """Without this check, the other tests could pass for the wrong reason."""
    with mutation_folder.fresh():
        assert run_command("train", "config.yaml", "run.dir=new")[1] is None
        assert run_command("train", "--resume", "run")[1] is None
        assert run_command("train", "--warm-start", "run", "data.train=data/train")[1] is None
        assert run_command("evaluate", "run", "--data", "data/test")[1] is None


@pytest.mark.parametrize("kind", NON_FILE_KINDS)
@pytest.mark.parametrize(
    "name",
    ["config.yaml", "data/schema.yaml", "data/train/part-0.parquet", "run/config.yaml", "run/schema.yaml", INDEX],
)
def test_non_files_in_place_of_files_are_handled(mutation_folder, name, kind):
    with mutation_folder.fresh():
        replace_by_kind(name, kind)
        run_command("train", "--resume", "run") if name.startswith("run") else run_command("train", "config.yaml")
