"""Test runs as jobs of a real Ray cluster: submit, stop and resume, with raytrec and with plain Ray."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from heads import RAY, RAYTREC, tiny_config
from json_lines import read_json_lines
from waiting import wait_for

REPO = Path(__file__).parents[2]
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


def write_config(place, **changes):
    """Write a config file with relative paths, as in jobs/."""
    place.write_text(yaml.safe_dump(tiny_config(**changes)))
    return str(place)


def write_long_config(place, **changes):
    """Write a config that trains for about a minute."""
    return write_config(place, train__epochs=400, train__log_every_steps=20, **changes)


class SubmittedJob:
    """`raytrec submit` as a background process whose output is read line by line."""

    def __init__(self, head, *arguments):
        self._begin(head, [RAYTREC, "submit", *arguments, "--address", head.url])

    def _begin(self, head, command):
        self.head, self.lines = head, []
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self._process = subprocess.Popen(command, env=head.env, **output)

    def until(self, text):
        """Read until a line contains this text; return that line."""
        for line in self._process.stdout:
            self.lines.append(line)
            if text in line:
                return line
        raise AssertionError(f"no '{text}' in\n{self.text}")

    def end(self):
        """Read to the end and return the exit code."""
        self.lines += self._process.stdout
        return self._process.wait(60)

    def stop(self):
        """Run `raytrec stop` and return its output."""
        done = self.head.run(RAYTREC, "stop", self.job, "--address", self.head.url)
        assert done.returncode == 0, done.stderr
        return done.stdout

    @property
    def text(self):
        return "".join(self.lines)

    def interrupt(self):
        self._process.send_signal(signal.SIGINT)

    @property
    def job(self):
        return next(line.split()[1] for line in self.lines if line.startswith("job "))


def find_only_run(head, name):
    (run,) = (head.root / "runs").glob(f"{name}-*")
    return run


def test_resubmitted_job_resumes_the_stopped_run(head, tmp_path):
    job = write_long_config(tmp_path / "again.yaml")
    first = SubmittedJob(head, job)
    first.until("rows/s")
    stopped = first.stop()
    assert "SIGTERM: saving" in stopped and "submit the same job again" in stopped
    assert first.end() == 143
    step = int(first.text.partition("stopped at step ")[2].partition(",")[0])
    assert step > 0 and not (find_only_run(head, "again") / "result.json").exists()

    assert head.run(RAYTREC, "stop", first.job, "--address", head.url).returncode == 1  # the job has ended

    most = "train.max_steps=40"  # which changes the result, so it is another run
    second = SubmittedJob(head, job, "scaling.num_workers=1")
    second.until(f"resuming at step {step} with 1 worker")
    second.interrupt()  # detach from the job
    assert second.end() == 130 and "the job continues" in second.text
    second.stop()
    assert find_only_run(head, "again")  # there is still only one run

    third = SubmittedJob(head, job, most)
    third.until("step")
    assert third.end() == 0, third.text
    assert len([*(head.root / "runs").glob("again-*")]) == 2


@pytest.fixture
def checkout(head, tmp_path):
    """Copy of raytrec/ and jobs/ to submit with Ray's command line."""
    for name in ("raytrec", "jobs"):
        place = tmp_path / "raytrec" / name
        shutil.copytree(REPO / name, place, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "raytrec"


class RaySubmittedJob(SubmittedJob):
    """`ray job submit` of a script of jobs/, from a checkout."""

    def __init__(self, head, folder, job, script, *arguments):
        command = [RAY, "job", "submit", "--address", head.url, "--working-dir", str(folder)]
        command += ["--submission-id", job, "--", "python", f"jobs/{script}", *arguments]
        self._begin(head, command)
        self.name = job

    def stop(self):
        assert self.head.run(RAY, "job", "stop", "--address", self.head.url, self.name).returncode == 0
        self.end()


def test_ray_job_submit_resumes_the_stopped_run(head, checkout):
    """Use the commands of the README with Ray's own command line."""
    write_long_config(checkout / "jobs" / "by-ray.yaml")
    train = ["train.py", "jobs/by-ray.yaml", "scaling.num_workers=2"]
    first = RaySubmittedJob(head, checkout, "by-ray-1", *train)
    first.until("rows/s")
    first.stop()
    assert "stopped at step" in first.text
    assert [*find_only_run(head, "by-ray").glob("checkpoints/step-*/checkpoint.json")]
    second = RaySubmittedJob(head, checkout, "by-ray-2", *train)
    second.until("resuming at step")
    second.stop()
    assert find_only_run(head, "by-ray")


def test_resubmitted_search_continues_its_trials(head, checkout):
    """Use the command of docs/tune.md: the finished trial is kept and the other one is resumed."""
    changes = {"train__epochs": 20, "train__eval_every_steps": 40, "checkpoint__every_steps": 5}
    write_config(checkout / "jobs" / "searched.yaml", scaling__num_workers=1, **changes)
    sizes = [{"bottom_mlp": [16], "top_mlp": top} for top in ([16], [600, 600])]
    (checkout / "space.yaml").write_text(yaml.safe_dump({"model": {"choice": sizes}}))
    tune = ["tune.py", "jobs/searched.yaml", "--space", "space.yaml", "--trials", "2"]
    tune += ["--at-once", "1", "--grace-steps", "10000"]  # so that no trial is stopped early
    first = RaySubmittedJob(head, checkout, "search-1", *tune)
    first.until("trial 2 starts")
    search = find_only_run(head, "searched")
    one, two = search / "trial-001", search / "trial-002"
    wait_for(lambda: [*two.glob("checkpoints/step-*/checkpoint.json")], "a checkpoint", 120)
    ended = (one / "result.json").read_bytes()
    first.stop()
    assert not (two / "result.json").exists() and not (search / "outcome.json").exists(), first.text

    again = RaySubmittedJob(head, checkout, "search-2", *tune)
    assert again.end() == 0, again.text[-3000:]
    assert find_only_run(head, "searched") == search and (one / "result.json").read_bytes() == ended
    outcome = json.loads((search / "outcome.json").read_text())
    assert [trial["state"] for trial in outcome["trials"]] == ["finished", "finished"]
    assert yaml.safe_load((search / "best.yaml").read_text())["model"]["top_mlp"] in ([16], [600, 600])
    starts = [event["step"] for event in read_json_lines(two / "events.jsonl", "start")]
    assert starts[0] == 0 and starts[-1] > 0, "the trial must resume from its checkpoint"


DATA = [f"data.{name}=data/made/{name}" for name in ("train", "valid", "test")] + ["data.global_batch_size=256"]


@pytest.mark.parametrize(
    "command, output",
    [
        (["prepare.py", "synthetic", "--out", "data/made", "--rows", "3000"], "3,000"),
        (["check.py", "jobs/synthetic.yaml", *DATA], "pass"),
        (["train.py", "jobs/synthetic.yaml", *DATA, "run.name=made"], "AUC"),
        (["evaluate.py", "runs/made", "--data", "data/made/test"], "AUC"),
        (["predict.py", "runs/made", "--data", "data/made/test", "--out", "scores/made"], "rows per second"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_job_scripts_run_on_the_cluster(head, checkout, command, output):
    job = RaySubmittedJob(head, checkout, f"script-{command[0][:-3]}", *command)
    assert job.end() == 0, job.text[-3000:]
    assert output in job.text


def test_submit_reports_mistakes_with_an_exit_code(head, tmp_path):
    config = write_config(tmp_path / "wrong.yaml")
    wrong, early = (
        head.run(RAYTREC, "submit", config, override, "--address", head.url)
        for override in ("data.train=data/nowhere", "train.epoch=3")
    )
    assert wrong.returncode == 1
    assert "error:" in wrong.stdout and "data/nowhere" in wrong.stdout and "Traceback" not in wrong.stdout
    assert early.returncode == 1 and "train.epochs" in early.stderr and "job " not in early.stdout


def test_submit_uploads_user_code(head, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "features.py").write_text(
        "import pyarrow.compute as pc\n"
        "def twice(table):\n"
        "    prices = pc.multiply(table['price'], 2)\n"
        "    return table.set_column(table.column_names.index('price'), 'price', prices)\n"
    )
    (tmp_path / "large.bin").write_bytes(os.urandom(1 << 20))
    transforms = [{"do": "mine.features:twice", "reads": ["price"], "writes": ["price"]}]
    write_config(tmp_path / "own.yaml", data__transforms=transforms, train__max_steps=20)
    done = head.run(RAYTREC, "submit", "own.yaml", "--address", head.url, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr


def test_second_driver_waits_for_the_first(head, tmp_path):
    job = write_long_config(tmp_path / "twice.yaml", scaling__shutdown_grace_s=5)
    first = SubmittedJob(head, job, "run.name=twice")
    first.until("rows/s")
    second = SubmittedJob(head, job, "run.name=twice")
    second.until("waiting for")
    began = time.monotonic()
    first.stop()
    second.until("resuming at step")
    assert time.monotonic() - began < 60
    second.stop()
    first.end(), second.end()
