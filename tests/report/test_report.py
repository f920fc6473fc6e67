"""The report page is self-contained, well-formed, complete and safe against hostile file contents."""

import json
import re
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
from recorded import write_json_lines, write_recorded_run

from raytrec.cli import main
from raytrec.common.errors import RunError
from raytrec.report.compare import compare, write
from raytrec.report.report import build, pictures, write_page

VOID_TAGS = {"meta", "br", "hr", "img", "input", "link"}
HOSTILE_TEXT = "<script>alert(1)</script>\"'&$x_1$\u202e\ud800 {{ 7*7 }}"


class CheckedPage(HTMLParser):
    """Parser that fails on mismatched tags, duplicate ids and references to external resources."""

    def __init__(self, path: Path):
        super().__init__()
        self.text, self.tags, self._open, self.ids = "", [], [], []
        source = path.read_text()
        self.feed(source)
        self.close()
        assert self._open == []
        assert len(self.ids) == len(set(self.ids))
        for link in re.findall(r"url\(([^)]*)\)|@import\s*(\S*)", source):
            assert link[0].strip("'\"").startswith("#"), link

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in VOID_TAGS:
            self._open.append(tag)
        for name, value in attributes:
            assert not name.startswith("on"), (tag, name)
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href", "action", "data"):
                assert value.startswith(("#", "data:image/png;base64,")), (tag, value[:60])

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID_TAGS:
            self._open.pop()

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] not in ("script", "style"):
            self.text += data


@pytest.fixture(scope="module")
def full_report(tmp_path_factory):
    folder = write_recorded_run(tmp_path_factory.mktemp("run"))
    return folder, CheckedPage(build(folder)[0])


@pytest.mark.slow
def test_report_of_a_full_run_contains_every_section_and_no_password(full_report):
    folder, page = full_report
    assert page.tags.count("svg") == 13
    for text in (
        "0.8100", "rows trained", "1,024,000",  # result
        "check parity failed at step 300: table table_1 on rank 1 differs by 0.2",
        "rank 1 (pid 7 on 10.0.0.7) died at step 220",
        "table_2", "row_wise", "0–1", "19.9 KiB",  # tables
        "Saved 2 times, last at step 500; each save blocked training for 20 ms on average.",
        "lr: 0.02",
    ):  # fmt: skip
        assert text in page.text, text
    for link in ("result", "learning", "speed", "tables", "checks", "events", "config"):
        assert link in page.ids
    assert "http://me:***@mlflow:5000" in page.text
    assert "sesame" not in (folder / "report.html").read_text()


def test_report_of_an_empty_folder_lists_missing_files(tmp_path):
    page = CheckedPage(build(tmp_path)[0])
    assert "svg" not in page.tags
    files = ["metrics.jsonl", "ranks.jsonl", "checks.jsonl", "events.jsonl", "config.yaml"]
    assert [text for text in ("no result.json", *files) if text not in page.text] == []
    assert pictures(tmp_path) == []


OPTIONAL_FILES = ("config.yaml", "schema.yaml", "plan.json")
JSONL_FILES = "metrics.jsonl ranks.jsonl checks.jsonl"


@pytest.mark.slow
@pytest.mark.parametrize(
    "left_out, drawn",
    [
        *(pytest.param(name, 13, marks=pytest.mark.survive) for name in OPTIONAL_FILES),
        ("result.json", 13),
        ("events.jsonl", 12),
        (JSONL_FILES, 1),  # the timeline
    ],
)
def test_report_works_without_any_single_file(tmp_path, left_out, drawn):
    write_recorded_run(tmp_path)
    for name in left_out.split():
        (tmp_path / name).unlink()
    page = CheckedPage(build(tmp_path)[0])
    assert page.tags.count("svg") == drawn and "table_2" in page.text


@pytest.mark.slow
def test_report_escapes_hostile_texts(tmp_path):
    write_recorded_run(tmp_path, names=[HOSTILE_TEXT, "a" * 300, r"$\frac$"])
    line = {"step": 100, "check": HOSTILE_TEXT, "passed": False, "text": HOSTILE_TEXT, "figure": 1.0, "limit": None}
    write_json_lines(tmp_path / "checks.jsonl", [line])
    events = [
        {"event": "started", "unix_s": 1.8e9, "attempt": 1, "workers": 1},
        {"event": "failed", "unix_s": 1.8e9 + 1, "cause": HOSTILE_TEXT, "step": HOSTILE_TEXT},
        {"event": HOSTILE_TEXT, "unix_s": 1.8e9 + 2},
    ]
    write_json_lines(tmp_path / "events.jsonl", events)
    result = json.loads((tmp_path / "result.json").read_text())
    (tmp_path / "result.json").write_text(json.dumps(result | {"name": HOSTILE_TEXT, "eval.auc": HOSTILE_TEXT}))
    (tmp_path / "config.yaml").write_text(f"run: {HOSTILE_TEXT}", errors="replace")
    page = CheckedPage(build(tmp_path)[0])
    assert page.tags.count("script") == 1  # the script that sorts tables
    assert page.text.count("<script>alert(1)</script>") >= 6
    assert "{{ 7*7 }}" in page.text and "$x_1$" in page.text


@pytest.mark.slow
def test_report_skips_values_of_wrong_types(tmp_path):
    write_recorded_run(tmp_path)
    wrong = [None, "x", [], {}, True, -1, float("nan"), 10**400]
    for name in ("ranks.jsonl", "metrics.jsonl", "checks.jsonl", "events.jsonl"):
        lines = [json.loads(text) for text in (tmp_path / name).read_text().splitlines()]
        for index, line in enumerate(lines):
            key = list(line)[index % len(line)]
            line[key] = wrong[index // len(line) % len(wrong)]
            for entry in (line.get("tables") or {}).values() if isinstance(line.get("tables"), dict) else ():
                entry[list(entry)[index % len(entry)]] = wrong[index % len(wrong)]
        write_json_lines(tmp_path / name, lines)
    (tmp_path / "plan.json").write_text(json.dumps([{"table": 3, "ranks": "all"}, {"ranks": [None, "1"]}, 5]))
    (tmp_path / "schema.yaml").write_text("tables: [1, 2]")
    (tmp_path / "result.json").write_text(json.dumps({"eval.auc": [], "train.rows": {}, "world_size": None}))
    CheckedPage(build(tmp_path)[0])


@pytest.mark.slow
def test_pictures_are_written_as_png_files(full_report):
    folder, _ = full_report
    written = pictures(folder)
    assert len(written) == 13 and all(path.parent == folder / "pictures" for path in written)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


@pytest.mark.slow
def test_report_is_built_within_15_cpu_seconds(tmp_path):
    """The limit is CPU time, so that a busy machine does not matter. Measured: 3 s."""
    write_recorded_run(tmp_path, tables=26, ranks=8, intervals=50)
    began = time.process_time()
    build(tmp_path)
    assert time.process_time() - began < 15


@pytest.mark.slow
def test_report_command_writes_page_and_pictures(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main([*arguments])
        return ended.value.code or 0, *capsys.readouterr()

    write_recorded_run(tmp_path / "run")
    status, out, err = run("report", "run")
    assert status == 0, err
    assert "report       run/report.html" in out and "run/pictures" in out
    CheckedPage(tmp_path / "run" / "report.html")
    (tmp_path / "empty").mkdir()
    for folder, what in (("nowhere", "run folder does not exist"), ("empty", "no files of a run")):
        status, _, err = run("report", folder)
        assert status == 1 and what in err and "Traceback" not in err


@pytest.mark.slow
def test_report_imports_neither_torch_nor_pyplot(tmp_path):
    write_recorded_run(tmp_path)
    code = (
        "import sys; from raytrec.report.report import build as b; "
        f"print({{'matplotlib', 'jinja2'}} & set(sys.modules)); b({str(tmp_path)!r}); "
        "print({'torch', 'mlflow', 'matplotlib.pyplot'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["set()", "set()"], done.stderr


UNWRITABLE_PATH = "/dev/null/none"  # not writable, even for root


@pytest.fixture
def unwritable_run(tmp_path):
    """Return a run whose folder must not be written to."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text("run: {name: theirs}\n")
    return tmp_path / "run"


def test_report_can_be_written_outside_the_run_folder(unwritable_run, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in [unwritable_run, *unwritable_run.rglob("*")]}
    page, _ = build(unwritable_run, tmp_path / "mine")
    assert page == tmp_path / "mine/report.html" and "theirs" in page.read_text()
    assert {path: path.stat().st_mtime_ns for path in [unwritable_run, *unwritable_run.rglob("*")]} == before


def test_unwritable_report_raises_a_clear_error(unwritable_run):
    with pytest.raises(RunError, match="cannot write the page") as error:
        build(unwritable_run, UNWRITABLE_PATH)
    assert "--out" in error.value.do
    with pytest.raises(RunError, match="cannot write the page"):
        write(compare([unwritable_run, unwritable_run]), f"{UNWRITABLE_PATH}/compare.html")


PAGE_VALUES = {"names": ["a", "b"], "folders": ["/a", "/b"], "results": [], "config": {}, "pictures": []}
KILLED_WRITER_CODE = f"""
import os, sys
from pathlib import Path
from raytrec.report.report import write_page
Path.replace = lambda *_: os.kill(os.getpid(), {int(signal.SIGKILL)})
write_page(Path(sys.argv[1]), "compare.html.j2", **{PAGE_VALUES!r})
"""


def test_page_write_removes_files_of_a_killed_writer(tmp_path):
    page = tmp_path / "report.html"
    page.write_text("before")
    killed = subprocess.run([sys.executable, "-c", KILLED_WRITER_CODE, str(page)], timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert page.read_text() == "before" and len(list(tmp_path.iterdir())) == 2
    write_page(page, "compare.html.j2", **PAGE_VALUES)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert page.read_text() != "before"
