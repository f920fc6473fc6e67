"""Test runs controlled by a process without torch, over Ray Client and as jobs of a real cluster."""

import hashlib
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import checkpoints
import light
import numpy as np
import parquet
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from heads import plain_environment, tiny_config
from json_lines import read_json_lines

from raytrec.retrieval.index import load_index
from raytrec.tracking.progress_log import strip_messages

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
WAYS = ["client", "url"]


def short_config(**changes):
    changes = {"train__epochs": 3, "train__eval_every_steps": 16, "tracking__report": True} | changes
    return json.dumps(tiny_config(**changes, train__log_every_steps=4, tracking__every_steps=8))


def long_config(lr):
    """Return a config that trains for minutes; a distinct `lr` makes it a distinct run."""
    often = {"train__log_every_steps": 10, "checkpoint__every_steps": 50}
    return json.dumps(tiny_config(train__epochs=2000, optim__dense={"lr": lr}, **often))


FULL_RUN_PROGRAM = """
cluster = Cluster(sys.argv[1])
run = cluster.train(json.loads(sys.argv[2]))
watched = run.watch()
same = cluster.run(run.job or run.name)
answer(
    folder=run.folder,
    watched=watched,
    waited=run.wait(),
    progress=run.progress(),
    metrics=run.metrics(),
    evaluated=run.evaluate("data/tiny/valid", batch_size=256),
    predicted=run.predict("data/tiny/valid", f"predictions/{run.name}", columns=["row"]),
    logs="".join(run.logs()),
    runs=cluster.runs(),
    same=[same.wait(), same.folder, same.progress()["state"]],
    job=run.job,
    **files(run),
    loaded=sorted({name.partition(".")[0] for name in sys.modules}),
)
"""
FILES_PROGRAM = """
import hashlib
hash_of = lambda content: hashlib.sha256(content).hexdigest()

def files(run):
    return dict(
        pictures={name: hash_of(png) for name, png in run.pictures().items()},
        report=hash_of(run.report().text.encode()),
        config=run.file("config.yaml"),
        tables=run.tables(),
        rows=run.rows("user", [39, 0, 7]).tolist(),
    )
"""
NO_FILES_PROGRAM = """
def files(run):
    try:
        run.tables()
    except RunError as error:
        return {"refused": str(error)}
"""


@pytest.fixture(scope="module", params=WAYS)
def full_run(request, head):
    """(access method, answers to all queries, run folder) of one run from start to end."""
    address = getattr(head, request.param)
    lr = {"client": 0.01, "url": 0.011}[request.param]
    files = {"client": FILES_PROGRAM, "url": NO_FILES_PROGRAM}[request.param]
    config = short_config(optim__dense={"lr": lr})
    got = light.run_notebook_program(files + FULL_RUN_PROGRAM, head.env, address, config, timeout=800)
    return request.param, got, head.root / "runs" / got["folder"].rpartition("/")[2]


def hash_file(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def steps_of(run, event):
    """Return the steps of a run's events of this kind."""
    return [e["step"] for e in read_json_lines(Path(run) / "events.jsonl", event)]


def test_client_shows_metrics_as_written(full_run):
    way, got, folder = full_run
    result = json.loads((folder / "result.json").read_text())
    assert got["folder"] == str(folder)
    assert got["watched"] == got["waited"] == got["same"][0] == result
    assert result["train.steps"] == 48 and result["eval.auc"] > 0.85
    assert got["same"][1:] == [str(folder), "finished"]
    assert (got["progress"]["step"], got["progress"]["total"]) == (48, 48)
    for kind, names in (("train", ("rows_per_s", "ne")), ("eval", ("auc", "ne"))):
        shown = got["metrics"][kind]["step"]
        lines_of = {line["step"]: line for line in read_json_lines(folder / "metrics.jsonl", kind)}
        assert shown == list(lines_of) if (way, kind) != ("url", "train") else set(shown) <= set(lines_of)
        for name in names:
            assert got["metrics"][kind][name] == [lines_of[step][name] for step in shown]
    assert got["evaluated"]["eval.rows"] == 501
    scores = [path.name for path in (folder.parents[1] / "predictions" / folder.name).glob("*.parquet")]
    assert got["predicted"]["predict.rows"] == 501 and len(scores) == got["predicted"]["predict.files"]
    name = got["job"] if way == "url" else folder.name
    assert {"name": name, "state": "finished"} in [{key: run[key] for key in ("name", "state")} for run in got["runs"]]


def test_only_ray_client_serves_run_files(full_run):
    way, got, folder = full_run
    if way == "url":
        assert "ray://HOST:10001" in got["refused"]
        return
    assert len(got["pictures"]) > 5
    assert got["pictures"] == {path.stem: hash_file(path) for path in (folder / "pictures").glob("*.png")}
    assert got["report"] == hash_file(folder / "report.html")
    assert got["config"] == (folder / "config.yaml").read_text()
    table = checkpoints.read_tensors(checkpoints.newest_checkpoint(folder))["tables/user/weight"]
    np.testing.assert_array_equal(np.float32(got["rows"]), table[[39, 0, 7]].numpy())
    assert got["tables"] == {"tag": [12, 8], "user": [40, 8]}


def test_client_needs_no_torch(full_run):
    _, got, _ = full_run
    assert not {"torch", "torchrec", "fbgemm_gpu", "mlflow"} & set(got["loaded"])
    code = "import importlib.util as u; answer(found=[n for n in sys.argv[1:] if u.find_spec(n)])"
    assert light.run_notebook_program(code, {}, "torch", "torchrec", "fbgemm_gpu", "mlflow")["found"] == []


def test_client_shows_log_lines(full_run):
    way, got, folder = full_run
    assert f"{folder.name}  step 48/48 (100%)" in got["logs"]
    assert re.search(rf"{folder.name}  step 32: AUC 0\.\d{{4}}  NE 0\.\d{{4}}", got["logs"])
    assert "\x1b" not in got["logs"]
    assert f"{folder.name}  step 48/48 (100%)" in got["stderr"]  # output of watch() outside a notebook
    if way == "url":
        assert f"{folder.name}  run folder {folder}\n" in got["logs"]
    written = strip_messages((folder / "run.log").read_text())
    assert set(written) <= set(got["logs"].splitlines(keepends=True))


STOP_PROGRAM = """
cluster = Cluster(sys.argv[1])
values = json.loads(sys.argv[2])

def until(run, step):
    while (now := run.progress())["step"] < step:
        assert now["state"] in ("starting", "running"), (now, "".join(run.logs()))
        time.sleep(0.5)
    return now

run = cluster.train(values)
until(run, 30)
before = [run.folder, cluster.run(run.job or run.name).progress()["state"]]
run.stop()
try:
    run.wait(120)
except RunError as error:
    stopped = str(error)
state, step = run.progress()["state"], run.progress()["step"]
again = cluster.train(values)
after = until(again, step + 1)
folder = again.folder
cluster.run(again.job or again.name).stop()
try:
    again.wait(120)
except RunError as error:
    answer(before=before, stopped=stopped, state=state, after=after, folder=folder, again=str(error))
"""


@pytest.mark.parametrize("way", WAYS)
def test_stopped_run_resumes_at_the_same_step(head, way):
    lr = {"client": 0.02, "url": 0.021}[way]
    got = light.run_notebook_program(STOP_PROGRAM, head.env, getattr(head, way), long_config(lr), timeout=800)
    assert got["before"][1] == "running" and got["state"] == "stopped"
    assert "the run was stopped" in got["stopped"] and "was stopped" in got["again"]
    assert got["folder"] == got["before"][0]
    first, second = steps_of(got["folder"], "start")
    assert first == 0
    assert second >= 30 and got["after"]["step"] > second  # nothing was trained twice
    assert steps_of(got["folder"], "stopped")[0] == second


INDEX_PROGRAM = """
run = Cluster(sys.argv[1]).train(json.loads(sys.argv[2]))
run.wait()
figures = run.index("data/films", f"indexes/{run.name}", item="film", columns=["title"])
answer(folder=run.folder, figures=figures)
"""


@pytest.mark.parametrize("way", WAYS)
def test_client_builds_an_item_index(head, way):
    (films := head.root / "data" / "films").mkdir(exist_ok=True)
    values = {"film": range(12), "title": [f"title {n}" for n in range(12)], "tags": [[n] for n in range(12)]}
    pq.write_table(pa.table({name: list(column) for name, column in values.items()}), films / "films.parquet")
    lr = {"client": 0.03, "url": 0.031}[way]
    model = {"name": "two_tower", "towers": {"query": ["user", "price"], "item": ["tags"]}}
    settings = json.loads(short_config(model__name="two_tower", optim__dense={"lr": lr})) | {"model": model}
    settings["train"]["epochs"] = 1
    got = light.run_notebook_program(INDEX_PROGRAM, head.env, getattr(head, way), json.dumps(settings), timeout=800)
    name = got["folder"].rpartition("/")[2]
    index = load_index(head.root / "indexes" / name)
    assert got["figures"]["index.items"] == 12 and got["figures"]["name"].startswith(f"{name}: ")
    vectors = np.eye(12, got["figures"]["index.width"], dtype=np.float32)
    found = index.search(vectors, k=3)
    assert [f"title {film}" for film in found["film"]] == list(found["title"])
    assert len(found) == 36


ABANDON_PROGRAM = """
run = Cluster(sys.argv[1]).train(json.loads(sys.argv[2]))
while (now := run.progress())["step"] < 60:
    assert now["state"] in ("starting", "running"), now
    time.sleep(0.3)
answer(name=run.name, job=run.job)
time.sleep(1000)
"""
WAIT_PROGRAM = """
run = Cluster(sys.argv[1]).run(sys.argv[2])
while (now := run.progress())["state"] == "running":
    time.sleep(0.5)
answer(now=now)
"""
PROGRESS_PROGRAM = """
run = Cluster(sys.argv[1]).run(sys.argv[2])
first = run.progress()
while run.progress()["state"] == "running" and run.progress()["step"] <= first["step"]:
    time.sleep(0.5)
answer(first=first, then=run.progress())
"""


def abandon_run(head, way, lr):
    """Start a run, kill its client during training, and return the run's name and job."""
    process = light.start_notebook_program(ABANDON_PROGRAM, head.env, getattr(head, way), long_config(lr))
    try:
        for line in process.stdout:
            if line.startswith(light.ANSWER_PREFIX):
                return json.loads(line.removeprefix(light.ANSWER_PREFIX)).values()
        raise AssertionError(process.stderr.read())
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()


def wait_for_end(head, name):
    """Wait until a run has ended and return its final progress."""
    return light.run_notebook_program(WAIT_PROGRAM, head.env, head.client, name, timeout=180)["now"]


def test_run_over_ray_client_ends_with_its_client(head):
    name, _ = abandon_run(head, "client", 0.03)
    now = wait_for_end(head, name)
    assert now["state"] == "interrupted"
    further = f"until(run, {now['step'] + 1})"  # one step more than recorded
    again = STOP_PROGRAM.replace("until(run, 30)", further).partition("again =")[0] + "answer(before=before)"
    got = light.run_notebook_program(again, head.env, head.client, long_config(0.03))
    assert got["before"] == [str(head.root / "runs" / name), "running"]
    starts = steps_of(head.root / "runs" / name, "start")
    assert starts[0] == 0 and starts[1] >= 50  # from its last checkpoint


def test_a_job_outlives_its_client(head):
    name, job = abandon_run(head, "url", 0.04)
    got = light.run_notebook_program(PROGRESS_PROGRAM, head.env, head.url, job)
    assert got["first"]["state"] == got["then"]["state"] == "running"
    assert got["then"]["step"] > got["first"]["step"]
    code = "run = Cluster(sys.argv[1]).run(sys.argv[2]); run.stop(); answer(folder=run.folder)"
    light.run_notebook_program(code, head.env, head.client, name)  # over Ray Client
    assert wait_for_end(head, name)["state"] == "stopped"


ERRORS_PROGRAM = """
cluster = Cluster(sys.argv[1])
values = json.loads(sys.argv[2])
bad = json.loads(sys.argv[3])
got = {}

def attempt(name, call):
    try:
        got[name] = ["nothing", str(call())]
    except RaytrecError as error:
        got[name] = [type(error).__name__, str(error)]

attempt("misspelt", lambda: cluster.train(values, ["train.epoch=3"]))
attempt("no data", lambda: cluster.train(values, ["data.train=data/nothing"]).wait(200))
attempt("bad data", lambda: cluster.train(bad).wait(300))
attempt("no run", lambda: cluster.run("nothing"))
attempt("elsewhere", lambda: cluster.run("/etc"))
if sys.argv[1].startswith("ray://"):
    attempt("no table", lambda: cluster.run(sys.argv[4]).rows("users", [1]))
    attempt("other file", lambda: cluster.run(sys.argv[4]).file("../../../auth_token"))
answer(**got)
"""


def test_client_errors_have_no_traceback(head, full_run):
    way, _, folder = full_run
    bad = head.root / "data" / "bad"
    if not bad.exists():
        parquet.write_dataset(bad)
        table = parquet.make_tiny_table(700, 9)
        wrong = table.set_column(2, "user", pa.array([*range(40), 4000] * 17 + [0, 1, 2]))
        pq.write_table(wrong, bad / "train" / "part-1.parquet")
    values = json.loads(short_config(optim__dense={"lr": {"client": 0.05, "url": 0.051}[way]}))
    broken = values | {"data": values["data"] | {"train": "data/bad/train"}}
    arguments = [getattr(head, way), json.dumps(values), json.dumps(broken), folder.name]
    got = light.run_notebook_program(ERRORS_PROGRAM, head.env, *arguments, timeout=800)
    assert got["misspelt"][0] == "ConfigError" and "did you mean train.epochs" in got["misspelt"][1]
    assert "data/nothing" in got["no data"][1] and got["no data"][0] != "nothing"
    assert "4000" in got["bad data"][1] and "column user" in got["bad data"][1]
    assert "where:" in got["bad data"][1]
    what = "job" if way == "url" else "run"
    assert f"there is no {what} 'nothing'" in got["no run"][1]
    assert f"there is no {what} '/etc'" in got["elsewhere"][1]
    if way == "client":
        assert folder.name in got["no run"][1] and "did you mean 'user'" in got["no table"][1]
        assert "is not a readable file of a run" in got["other file"][1]
    assert not any("Traceback" in text for _, text in (v for k, v in got.items() if k != "stderr"))


CONNECT_PROGRAM = """
began = time.time()
try:
    Cluster(sys.argv[1])
except RaytrecError as error:
    answer(error=str(error), rendered=error._render_traceback_(), seconds=time.time() - began)
"""


@pytest.mark.parametrize("way", WAYS)
def test_client_reports_wrong_or_missing_token(head, way, tmp_path):
    wrong = tmp_path / "token"
    wrong.write_text("0" * 64)
    wrong.chmod(0o600)
    env = head.env | {"RAY_AUTH_TOKEN_PATH": str(wrong)}
    got = light.run_notebook_program(CONNECT_PROGRAM, env, getattr(head, way))
    assert "refuses the token" in got["error"] and got["seconds"] < 60
    assert got["rendered"] == [f"error: {got['error']}"]
    got = light.run_notebook_program(CONNECT_PROGRAM, plain_environment() | {"HOME": str(tmp_path)}, getattr(head, way))
    assert "the token of the Ray cluster is missing" in got["error"]


@pytest.mark.parametrize("address", ["ray://127.0.0.1:9", "http://127.0.0.1:9", "127.0.0.1:10001"])
def test_client_reports_wrong_address(head, address):
    got = light.run_notebook_program(CONNECT_PROGRAM, head.env, address)
    assert address in got["error"] and "expected:" in got["error"]
    assert len(got["error"].splitlines()) <= 4


def test_client_reports_mismatched_ray_version(head, tmp_path):
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*install, "--target", str(tmp_path), "ray==2.59.0"], check=True, timeout=400)
    env = head.env | {"PYTHONPATH": str(tmp_path)}
    got = light.run_notebook_program(CONNECT_PROGRAM, env, head.client)
    assert got["error"].startswith("this version of raytrec does not support ray 2.59.0\n")
    assert "expected: ray 2.60.0" in got["error"] and len(got["error"].splitlines()) <= 4
    older = "from raytrec.cluster import access; from raytrec.compat import versions\n"  # an older raytrec
    older += "access.RAY = '2.59.0'; versions.SUPPORTED_VERSIONS['ray'] = ('2.59.0',)\n"
    got = light.run_notebook_program(older + CONNECT_PROGRAM, env, head.client)
    assert "Ray 2.59.0 on the cluster, as here" in got["error"], got["error"]
    assert len(got["error"].splitlines()) <= 4


def test_client_reports_mismatched_python_version(head):
    """Ray is made to see another version, since no other Python is installed."""
    ours = f"{sys.version_info[0]}.{sys.version_info[1]}"
    other = "3.12" if ours != "3.12" else "3.11"
    pretend = f"""
import ray._private.utils as utils
ours = utils.compute_version_info
utils.compute_version_info = lambda: (ours()[0], "{other}.1")
sys.version_info = (3, {other[2:]}, 1)
"""
    got = light.run_notebook_program(pretend + CONNECT_PROGRAM, head.env, head.client)
    assert got["error"].startswith(f"the cluster runs Python {ours}.")
    assert f"but this process runs Python {other}" in got["error"] and "http://" in got["error"]
