"""Test that the console session in docs/jobs.md works as shown."""

import shutil
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from heads import make_short_link, plain_environment

REPO = Path(__file__).parents[2]


@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_session_in_the_jobs_page_works_as_shown(tmp_path):
    from transcript import TerminalShell, console_blocks, describe_difference, parse_transcript

    (tmp_path / "home").mkdir()
    shutil.copytree(REPO / "jobs", tmp_path / "jobs")
    env = plain_environment() | {"HOME": str(tmp_path / "home"), "RAY_TMPDIR": str(make_short_link(tmp_path))}
    # A separate network, in which the usual ports are free.
    bash = ["unshare", "--net", "sh", "-c", "ip link set lo up && exec bash --norc --noprofile -i"]
    (transcript,) = console_blocks(REPO / "docs" / "jobs.md")
    shell = TerminalShell(bash, tmp_path, env, timeout=400)
    try:
        for command, expected in parse_transcript(transcript):
            got = shell.type(command, expected)
            difference = describe_difference([line for line in expected if line != "^C"], got)
            assert difference is None, f"$ {command}\n{difference}\n--- all of it:\n" + "\n".join(got)
    finally:
        shell.close()
        for process in psutil.process_iter():  # the head outlives the shell of a session that failed
            with suppress(psutil.Error):
                if process.environ().get("HOME") == env["HOME"]:
                    process.kill()


def test_differences_reports_changed_output():
    pytest.importorskip("pexpect")
    from transcript import describe_difference

    line = "tiny-20261122-012915  step 40/80 (50%)  1,000 rows/s"
    other = "tiny-20261231-000000  step 7/9 (77%)  12.5 rows/s"
    assert describe_difference(["...", line, "..."], ["a", "warning: rank 0 is slow", other, "c"]) is None
    assert "the end" in describe_difference([line], [other, "more"])
    assert "got:" in describe_difference([line], [other.replace("rows", "cats")])
    assert f"expected: {line}" in describe_difference(["...", line], ["a", "b"])
