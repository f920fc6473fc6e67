"""Test that the console session in docs/jobs.md works as shown."""

import shutil
from pathlib import Path

import pytest
from heads import plain_environment, short_folder

REPO = Path(__file__).parents[2]


@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_session_in_the_jobs_page_works_as_shown(tmp_path):
    from transcript import Shell, commands, console_blocks, differences

    (tmp_path / "home").mkdir()
    shutil.copytree(REPO / "jobs", tmp_path / "jobs")
    env = plain_environment() | {"HOME": str(tmp_path / "home"), "RAY_TMPDIR": str(short_folder(tmp_path))}
    # A separate network, in which the usual ports are free.
    bash = ["unshare", "--net", "sh", "-c", "ip link set lo up && exec bash --norc --noprofile -i"]
    (transcript,) = console_blocks(REPO / "docs" / "jobs.md")
    shell = Shell(bash, tmp_path, env, timeout=400)
    try:
        for command, expected in commands(transcript):
            got = shell.type(command, expected)
            difference = differences([line for line in expected if line != "^C"], got)
            assert difference is None, f"$ {command}\n{difference}\n--- all of it:\n" + "\n".join(got)
    finally:
        shell.close()


def test_differences_reports_changed_output():
    pytest.importorskip("pexpect")
    from transcript import differences

    line = "tiny-20261122-012915  step 40/80 (50%)  1,000 rows/s"
    other = "tiny-20261231-000000  step 7/9 (77%)  12.5 rows/s"
    assert differences([line], [other]) is None
    assert differences([line], ["warning: rank 0 is slow", other]) is None
    assert differences(["...", line, "..."], ["a", "b", other, "c"]) is None
    assert "the end" in differences([line], [other, "more"])
    assert "got:" in differences([line], [other.replace("rows", "cats")])
    assert f"expected: {line}" in differences(["...", line], ["a", "b"])
    assert differences(["in /home/me/runs"], ["in /tmp/x-1/runs"]) is None
