"""Test the notebooks in a kernel without torch on a cluster that the tests start."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import light
import numpy as np
import pytest
import yaml
from heads import RAYTREC, RayHead

REPO = Path(__file__).parents[2]
NOTEBOOKS = REPO / "notebooks"
ML100K = Path(os.environ.get("RAYTREC_ML100K", REPO.parent / "shared/data/ml-100k"))
FILM = "Star Wars (1977)"

pytestmark = pytest.mark.timeout(1200)


def movielens(folder):
    """Write files in MovieLens-100K's layout: 300 users, 200 films; most users like every second film."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    users, films = rng.integers(1, 301, 30_000), rng.integers(1, 201, 30_000)
    rating = np.where((films % 2 == 0) ^ (rng.random(30_000) < 0.1), 5, 1)
    rows = zip(users, films, rating, rng.integers(8e8, 9e8, 30_000), strict=True)
    (folder / "u.data").write_text("".join("\t".join(map(str, row)) + "\n" for row in rows))
    flags = "|".join(["0"] * 18 + ["1"])
    titles = {50: FILM} | {film: f"Film {film} (1990)" for film in range(1, 201) if film != 50}
    (folder / "u.item").write_text("".join(f"{n}|{titles[n]}|||x|{flags}\n" for n in range(1, 201)))
    (folder / "u.user").write_text("".join(f"{n}|33|M|none|12345\n" for n in range(1, 301)))
    return folder


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """Cluster with MovieLens at the path that jobs/movielens.yaml uses."""
    source = ML100K if ML100K.is_dir() else movielens(tmp_path_factory.mktemp("source") / "ml-100k")
    with RayHead(tmp_path_factory.mktemp("head") / "h") as head:
        command = [RAYTREC, "prepare", "movielens", "--source", str(source), "--split", "random"]
        command += ["--out", str(head.root / "data" / "ml100k")]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
        yield head


@pytest.fixture(scope="module")
def execute_notebook(head, tmp_path_factory):
    """Function that executes a notebook without torch on a cluster and returns it with its outputs."""
    out = tmp_path_factory.mktemp("executed")
    for part in ("notebooks", "jobs"):
        shutil.copytree(REPO / part, out / part)

    def execute(name, address):
        python = light.notebook_python()
        env = head.env | {"RAYTREC_ADDRESS": address, "MOVIELENS": str(head.root / "data" / "ml100k")}
        env["PATH"] = os.pathsep.join([str(Path(python).parent), env["PATH"]])
        env |= {"IPYTHONDIR": str(out / "ipython"), "JUPYTER_CONFIG_DIR": str(out / "jupyter")}
        command = [python, "-m", "nbconvert", "--to", "notebook", "--execute", f"{name}.ipynb"]
        # The kernel uses Unix sockets in the working directory, so no port is opened.
        command += ["--output-dir", str(out), "--KernelManager.transport=ipc"]
        command += ["--ExecutePreprocessor.timeout=900"]
        options = {"cwd": out / "notebooks", "env": env, "capture_output": True, "text": True}
        done = subprocess.run(command, timeout=1100, **options)
        assert done.returncode == 0, done.stderr[-6000:]
        return json.loads((out / f"{name}.ipynb").read_text())

    return execute


def outputs(notebook, kind):
    """Return all outputs of a kind, such as text/html, image/png or stdout."""
    found = []
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            if kind == "stdout" and output.get("name") == "stdout":
                found.append("".join(output["text"]))
            elif kind in output.get("data", {}):
                found.append("".join(output["data"][kind]))
    return found


def result_of(head, notebook):
    """Return the result of the run shown in a notebook, and the HTML page that shows it."""
    page = next(page for page in outputs(notebook, "text/html") if ">finished<" in page)
    name = page.split("<b>")[1].split("</b>")[0]
    return json.loads((head.root / "runs" / name / "result.json").read_text()), page


@pytest.mark.cluster
def test_quickstart_notebook_trains_and_evaluates(head, execute_notebook):
    notebook = execute_notebook("quickstart", head.client)
    result, page = result_of(head, notebook)
    assert "width:100.0%" in page and f"<b>{result['eval.auc']:.4f}</b>" in page
    assert result["eval.auc"] > 0.7
    pages = outputs(notebook, "text/html")
    assert any("<iframe sandbox" in each and "srcdoc=" in each for each in pages)
    assert any(each.count("data:image/png;base64,") > 5 for each in pages)
    assert any(f"{result['eval.auc']:.6f}" in each for each in pages)  # the table of the result
    assert len(outputs(notebook, "image/png")) == 1  # one picture that was updated, not many
    assert any(text.startswith("AUC 0.") for text in outputs(notebook, "stdout"))
    assert not [o for cell in notebook["cells"] for o in cell.get("outputs", []) if o.get("name") == "stderr"]


@pytest.mark.cluster
def test_explore_notebook_finds_similar_films(head, execute_notebook):
    """The test requires the run of the quickstart notebook."""
    notebook = execute_notebook("explore", head.client)
    tables, films, near = outputs(notebook, "text/html")
    assert "item" in tables and "user" in tables and FILM not in near
    assert near.count("<tr>") == 11  # a header row and ten neighbors
    assert len(outputs(notebook, "image/png")) == 1
    assert "Toy Story" in films or "Film 1 " in films
    if ML100K.is_dir():  # of 1,682 films
        alike = ("Raiders of the Lost Ark", "Return of the Jedi", "Empire Strikes Back")
        assert any(title in near for title in alike)


@pytest.mark.cluster
def test_jobs_notebook_stops_and_resumes_a_run(head, execute_notebook):
    notebook = execute_notebook("jobs", head.url)
    said = "\n".join(outputs(notebook, "stdout"))
    name = said.split(" trains ")[1].split()[0]
    assert "the run was stopped" in said
    assert f"{name}  resuming at step" in said
    assert f"{name}  stopped at step" in said
    evaluated, metrics = outputs(notebook, "text/html")
    assert "eval.auc" in evaluated and "rows_per_s" in metrics
    events = (head.root / "runs" / name / "events.jsonl").read_text()
    assert [json.loads(line)["event"] for line in events.splitlines()].count("stopped") == 2


@pytest.mark.cluster
def test_own_model_notebook_trains_its_model(head, execute_notebook):
    """The model class of the notebook is uploaded with the run, since the cluster lacks its file."""
    result, _ = result_of(head, execute_notebook("own_model", head.client))
    assert result["name"].startswith("gru-ranker") and result["eval.auc"] > 0.7
    saved = yaml.safe_load((head.root / "runs" / result["name"] / "config.yaml").read_text())
    assert saved["model"]["name"] == "gru_ranker:GRURanker"


@pytest.mark.parametrize("name", ["quickstart", "jobs", "explore", "own_model"])
def test_notebooks_are_committed_without_outputs(name):
    notebook = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())
    for cell in notebook["cells"]:
        assert not cell.get("outputs") and cell.get("execution_count") is None
        text = "".join(cell["source"])
        assert not [place for place in ("/work", "/tmp", "/root", "/home") if place in text]
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
