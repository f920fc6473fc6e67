"""Tests that links, headings, files, configuration keys, commands and options in the docs exist."""

import re
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import typer
import yaml
from pydantic import BaseModel

from raytrec.cli import app
from raytrec.config.models import SECTIONS
from raytrec.config.run_config import RunConfig
from raytrec.metrics.registry import METRICS, RESERVED

REPO = Path(__file__).parents[1]
TOP_LEVEL_PAGES = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"]
PAGES = [*TOP_LEVEL_PAGES, *(f"docs/{page.name}" for page in sorted((REPO / "docs").glob("*.md")))]
CHANGELOG = "CHANGELOG.md"  # also mentions removed keys, commands and files
# Dotted names that look like configuration keys but are run results or Python attributes.
NOT_CONFIG_KEYS = {f"train.{name}" for name in ("skipped_rows", "rows_per_s", "ended", "flops_per_s", "mfu")}
NOT_CONFIG_KEYS |= {"run.rows", "run.report"}
FILE_SUFFIXES = set(
    ["json", "jsonl", "yaml", "yml", "py", "md", "html", "png", "log", "ipynb", "db", "mark", "parquet", "onnx", "txt"]
)


def read_page(page: str) -> str:
    return (REPO / page).read_text()


def code_snippets(page: str) -> list[str]:
    """Return the inline code snippets and the lines of code blocks of a page."""
    lines = read_page(page).splitlines()
    blocks = [line for line in lines if line.startswith("    ")]
    prose = "\n".join(line for line in lines if not line.startswith("    "))
    fenced = re.findall(r"(?ms)^```\w*\n(.*?)^```", prose)
    inline = re.findall(r"`([^`\n]+(?:\n[^`\n]+)?)`", re.sub(r"(?ms)^```.*?^```", "", prose))
    return blocks + [line for block in fenced for line in block.splitlines()] + inline


@cache
def heading_anchors(page: str) -> set[str]:
    """Return the anchors that GitHub generates for the headings of a page."""
    headings = re.findall(r"(?m)^#+ (.+)$", re.sub(r"(?ms)^```.*?^```", "", read_page(page)))
    words = [re.sub(r"[`*]|\[|\]\([^)]*\)", "", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in words}


@pytest.mark.parametrize("page", PAGES)
def test_doc_links_resolve(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", read_page(page)):
        if re.match(r"[a-z]+://", target):
            continue
        path, _, anchor = target.partition("#")
        file = (REPO / page).parent / path if path else REPO / page
        assert file.exists(), target
        if anchor and file.suffix == ".md":
            assert anchor in heading_anchors(str(file.resolve().relative_to(REPO))), target


def test_readme_has_at_most_150_lines():
    assert len(read_page("README.md").splitlines()) <= 150


def test_every_page_is_linked_from_readme_or_map():
    linked = set(re.findall(r"docs/\w+\.md", read_page("README.md") + read_page("ARCHITECTURE.md")))
    assert linked >= {page for page in PAGES if page.startswith("docs/")}


def models_in_annotation(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in models_in_annotation(part)]


def fields_by_key(model: type[BaseModel]) -> dict[str, Any]:
    return {field.alias or name: field for name, field in model.model_fields.items()}


def is_key_path(words: list[str], models: list[type[BaseModel]]) -> bool:
    """Return True if a key path exists in the models. Any path below a free-form dict is accepted."""
    if not words:
        return True
    for model in models:
        field = fields_by_key(model).get(words[0])
        if field is None:
            continue
        inner, rest = models_in_annotation(field.annotation), words[1:]
        if str(field.annotation).startswith("dict"):
            rest = rest[1:]
            if not inner:
                return True
        if is_key_path(rest, inner):
            return True
    return False


def is_config_key(key: str) -> bool:
    section, *rest = key.split(".")
    rest = rest[1:] if section == "tasks" and rest[1:] else rest  # tasks.NAME.weight
    if section == "model":
        return is_key_path(rest, list(SECTIONS.values()))
    return is_key_path(rest, models_in_annotation(fields_by_key(RunConfig)[section].annotation))


def is_result_key(key: str) -> bool:
    """Return True if a key is in result.json: eval.METRIC or a reserved count."""
    section, *_, name = key.split(".")
    return section == "eval" and (name in METRICS.parts or name in RESERVED)


def config_keys_in(snippet: str) -> list[str]:
    """Return the configuration keys in a snippet, without file names, calls and Python paths."""
    sections = "|".join(fields_by_key(RunConfig))
    found = re.findall(rf"(?<![\w./@-])((?:{sections})(?:\.[a-z_]\w*\*?|\.[A-Z]+)+)(?![\w(/:-])", snippet)
    found = [key for key in found if key not in NOT_CONFIG_KEYS and not is_result_key(key)]
    return [key for key in found if key.rpartition(".")[2] not in FILE_SUFFIXES]


@pytest.mark.parametrize("page", [page for page in PAGES if page != CHANGELOG])
def test_docs_mention_only_existing_config_keys(page):
    mentioned = {key for snippet in code_snippets(page) for key in config_keys_in(snippet)}
    placeholders = {key for key in mentioned if key.rpartition(".")[2].isupper()}  # checks.NAME
    assert not {key for key in mentioned - placeholders if not is_config_key(key)}


def test_key_search_finds_config_keys():
    assert len({key for page in PAGES for snippet in code_snippets(page) for key in config_keys_in(snippet)}) > 50
    assert [is_config_key(f"plan.tables.X.{name}") for name in ("dtype", "kernel")] == [True, False]
    assert config_keys_in("see plan.json, run.watch() and x.train.py; set train.epochs=3") == ["train.epochs"]


def yaml_blocks(page: str) -> list[dict]:
    """Return the indented blocks of a page that are run configurations."""
    found = []
    for block in re.findall(r"(?m)(?:^    .*\n|^\n(?=    ))+", read_page(page)):
        try:
            values = yaml.safe_load(re.sub(r"(?m)^    ", "", block))
        except yaml.YAMLError:
            continue
        if isinstance(values, dict) and set(values) <= set(fields_by_key(RunConfig)):
            found.append(values)
    return found


def key_paths(values: Any) -> list[list[str]]:
    if not isinstance(values, dict):
        return [[]]
    return [[str(key), *path] for key, value in values.items() for path in key_paths(value)] or [[]]


@pytest.mark.parametrize("page", PAGES)
def test_docs_yaml_has_only_existing_config_keys(page):
    for block in yaml_blocks(page):
        for path in key_paths(block):
            assert is_config_key(".".join(word.replace(".", "_") for word in path)), path


def test_yaml_search_finds_configs():
    assert sum(len(yaml_blocks(page)) for page in PAGES) >= 8


@cache
def options_by_command() -> dict[str, set[str]]:
    """Return command → options; `prepare` includes the options of all recipes."""
    group = typer.main.get_command(app)
    found = {}
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        inner = getattr(command, "list_commands", lambda _: [])(None)
        several = [command, *(command.get_command(None, recipe) for recipe in inner)]
        found[name] = {option for each in several for parameter in each.params for option in parameter.opts}
    return found


def raytrec_calls(snippet: str) -> list[str]:
    """Return the raytrec command lines in a snippet; Python code and messages have none."""
    if snippet.lstrip().startswith(("error:", "import ", "from ", "expected:", "result =")):
        return []
    before = r"(?:^|[\s;(])(?<!-n )(?:\S*bin/|python -m )?raytrec (?=[a-z])"
    return [re.split(r"[|;&]", call)[0] for call in re.split(before, snippet.partition("  #")[0])[1:]]


@pytest.mark.parametrize("page", [page for page in PAGES if page != CHANGELOG])
def test_docs_mention_only_existing_commands(page):
    for call in (call for snippet in code_snippets(page) for call in raytrec_calls(snippet)):
        name = re.match(r"[\w-]+", call)[0]
        assert name in options_by_command(), call
        given = re.findall(r"(?<![\w-])--[a-z][a-z-]*", call)
        assert set(given) - {"--help"} <= options_by_command()[name], call


def test_call_search_finds_commands():
    calls = raytrec_calls("a | .venv/bin/raytrec follow JOB --x; raytrec stop  # raytrec no")
    assert calls == ["follow JOB --x", "stop"]
    calls = [call for page in PAGES for snippet in code_snippets(page) for call in raytrec_calls(snippet)]
    assert len({call.split()[0] for call in calls}) > 8
    assert "--source" in options_by_command()["prepare"] and "--detach" in options_by_command()["submit"]


@pytest.mark.parametrize("page", [page for page in PAGES if page != CHANGELOG])
def test_docs_mention_only_existing_files(page):
    roots = "raytrec|tests|benchmarks|jobs|datasets|deploy|docs|notebooks|requirements"
    for snippet in code_snippets(page):
        for path in re.findall(rf"(?<![\w/.~])((?:{roots})/[\w./-]+\.(?:py|yaml|yml|md|txt|sh|ipynb))", snippet):
            assert (REPO / path).exists(), f"{page}: {path}"


@pytest.fixture
def extending_module(tmp_path, monkeypatch):
    """Import the Python blocks of docs/extending.md as the module `extending_module`."""
    blocks = re.findall(r"(?ms)^```python\n(.*?)^```", read_page("docs/extending.md"))
    (tmp_path / "mine.py").write_text("\n\n".join(blocks))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    yield import_module("mine")
    del sys.modules["mine"]


def checked_run_with(values):
    """Return a stub of a CheckedRun with one table of one shard."""
    from raytrec.common.collectives import Peers
    from raytrec.embeddings.tables import Shard, ShardedValues

    shard = Shard(0, range(values.shape[0]), range(values.shape[1]), values)
    weight = ShardedValues(tuple(values.shape), values.dtype, [shard], False, values.device)
    return SimpleNamespace(peers=Peers(alone=True), tables={"item": SimpleNamespace(weight=weight)})


def test_extending_page_examples_run(extending_module, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch
    from raytrec_datasets import find_recipe

    from raytrec.checks.live.outcome import STEP, Position
    from raytrec.checks.live.registry import select_enabled_checks
    from raytrec.config.run_config import load_config
    from raytrec.config.schema import Schema
    from raytrec.data.transform import apply_transforms
    from raytrec.metrics.selection import Selection
    from raytrec.models import build_model
    from raytrec.tasks.outputs import TaskOutputs
    from raytrec.tasks.task import resolve_tasks

    find_recipe("mine:shop")(tmp_path / "shop", rows=10)
    schema = Schema.load(tmp_path / "shop" / "schema.yaml")
    assert pq.read_table(tmp_path / "shop" / "train").num_rows == 10
    folders = {name: str(tmp_path / "shop" / name) for name in ("train", "valid")}
    values: dict = {"data": folders}
    for block in yaml_blocks("docs/extending.md"):
        for section, value in block.items():
            values[section] = {**values.get(section, {}), **value} if isinstance(value, dict) else value
    assert set(values) == {"data", "model", "tasks", "checks", "checkpoint", "train"}
    values["tasks"] = [{"loss": "mine:Huber", "metrics": ["mae", "mine:Accuracy"]}]
    config = load_config(values)

    logits_B = build_model(schema, config.model)(torch.zeros(3, 0), {"item": torch.ones(3, 16)})
    assert logits_B.shape == (3,)
    (task,) = resolve_tasks(config.tasks, schema)
    labels_B = torch.tensor([0.0, 1.0, 1.0])
    assert task.loss.of_rows(logits_B, labels_B).shape == (3,)
    selection = Selection([task])
    assert selection.best(config.checkpoint.best_metric).title == "accuracy at 0.5"
    view = TaskOutputs(logits_B.detach(), torch.tensor([0.1, 0.9, 0.2]), labels_B, torch.ones(3))
    assert float(extending_module.Accuracy.figure(extending_module.Accuracy.sums(view))) == pytest.approx(2 / 3)

    bounded = select_enabled_checks(config)["bounded"]
    runs = [checked_run_with(torch.tensor([[size]])) for size in (3.0, 200.0)]
    outcomes = [bounded.check(run).evaluate(Position(7), True) for run in runs]
    assert bounded.reaction == "warn" and STEP in bounded.check.moments
    assert outcomes[0].passed and not outcomes[1].passed and "table item: weight 200 on rank 0" in outcomes[1].text
    table = apply_transforms(pa.table({"clicks": [1], "views": [10]}), tuple(config.data.transforms), "here")
    assert table["ratio"].to_pylist() == [pytest.approx(0.05)]
