"""The model and the live check of docs/extending.md on two ranks (tests/test_docs.py runs the rest)."""

import re
from pathlib import Path

from loops import ROW_WISE, run_with_fault
from ranks import run_on_ranks

from raytrec.config.models import PythonSection

PAGE = Path(__file__).parents[2] / "docs/extending.md"


def test_documented_model_and_check_run_on_two_ranks(tmp_path, monkeypatch):
    blocks = re.findall(r"(?ms)^```python\n(.*?)^```", PAGE.read_text())
    (tmp_path / "documented.py").write_text("\n\n".join(blocks))
    monkeypatch.syspath_prepend(tmp_path)
    model = PythonSection(name="documented:Net", options={"hidden": 4})
    settings = {"model": model, "checks": {"custom": {"documented:Bounded": "stop"}}}
    for outcomes in run_on_ranks(2, run_with_fault, ROW_WISE, None, settings):
        bounded = [outcome for outcome in outcomes if outcome["check"] == "bounded"]
        assert len(bounded) >= 3 and all(one["passed"] and 0 < one["figure"] < 100 for one in bounded)
