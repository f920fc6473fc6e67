"""Metrics of the largest and the worst slices, with slice names, on 1, 2 and 3 ranks."""

import pytest
import torch
from evaluations import Case, evaluations
from sklearn.metrics import roc_auc_score

COUNTRIES = ["DE", "FR", "US", "CH", None, "LI", *(f"C{i}" for i in range(9))]
SIZES = [400, 300, 200, 180, 170, 3, *range(165, 75, -10)]
NOISE = [0.1, 0.5, 9.0, 0.2, 2.0, 0.0, *(0.3 + 0.4 * i for i in range(9))]
SHOWN = 10


def rows(**settings):
    draw = torch.Generator().manual_seed(3)
    of = torch.repeat_interleave(torch.arange(len(SIZES)), torch.tensor(SIZES))
    of = of[torch.randperm(len(of), generator=draw)]
    logits = torch.randn(len(of), generator=draw)
    noise = torch.tensor(NOISE)[of]
    labels = (logits + noise * torch.randn(len(of), generator=draw) > 0).float()
    weights = (torch.arange(len(of)) % 10 < 9).float()
    texts = [COUNTRIES[i] for i in of]
    settings = {"slices": ["group"], **settings}
    return Case(logits, labels, weights, ["auc"], of * 31 + 5, settings=settings, texts=texts)


def compute_expected(case):
    """Return country → (rows, AUC, calibration); AUC is None for a single class."""
    found = {}
    for country in COUNTRIES:
        kept = torch.tensor([text == country for text in case.texts]) & (case.weights > 0)
        y, p = case.labels[kept], case.logits[kept].sigmoid()
        auc = float(roc_auc_score(y, p)) if len(y.unique()) == 2 else None
        found[str(country or "null")] = int(kept.sum()), auc, float(p.sum() / y.sum()) if y.any() else None
    return found


def has_enough_rows(case, country):
    kept = torch.tensor([str(text or "null") == country for text in case.texts]) & (case.weights > 0)
    positives = int(case.labels[kept].sum())
    return min(positives, int(kept.sum()) - positives) >= 30


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3])
def test_largest_and_worst_slices_are_listed_by_name(world):
    cases = [rows(), rows(max_exact_rows=100)]
    of_ranks = evaluations(world, cases)
    assert all(other[0][0] == of_ranks[0][0][0] for other in of_ranks)
    exact, binned = ({**figures["slices"]["y"]["group"]} for figures, _ in of_ranks[0])
    wanted = compute_expected(cases[0])
    by_rows = sorted(wanted, key=lambda name: -wanted[name][0])
    by_auc = sorted((name for name in wanted if has_enough_rows(cases[0], name)), key=lambda name: wanted[name][1])
    assert exact["slices"] == binned["slices"] == len(COUNTRIES) and "LI" not in by_auc, "LI has too few rows"
    assert [each["slice"] for each in exact["largest"]] == by_rows[:SHOWN]
    assert [each["slice"] for each in exact["worst"]] == by_auc[:SHOWN]
    assert {"US", "null"} & set(by_auc[:3])
    for each in exact["largest"]:
        rows_, auc, calibration = wanted[each["slice"]]
        assert each["rows"] == rows_ and set(each) == {"slice", "rows", "auc", "calibration"}
        assert each["auc"] == pytest.approx(auc, abs=1e-6)
        assert each["calibration"] == pytest.approx(calibration, abs=1e-6)
    for each in binned["largest"]:
        rows_, auc, calibration = wanted[each["slice"]]
        assert each["rows"] == rows_ and each["calibration"] == pytest.approx(calibration, abs=1e-6)
        assert abs(each["auc"] - auc) <= each["auc_bound"] + 1e-9 < 0.05


def test_regression_slices_are_sorted_by_calibration():
    case = rows()
    numbers = Case(**{**vars(case), "logits": case.logits.abs() + case.groups, "loss": "mse", "metrics": ["mse"]})
    numbers = Case(**{**vars(numbers), "labels": numbers.groups * 2.0})
    ((figures, _),) = evaluations(1, [numbers])[0]
    worst = figures["slices"]["y"]["group"]["worst"][0]
    assert worst["auc"] is None and worst["calibration"] > 0
    of = [(-abs(torch.tensor(c).log()), n) for n, c in compute_calibrations(numbers).items()]
    assert worst["slice"] == min(of)[1]


def compute_calibrations(case):
    names = [str(text or "null") for text in case.texts]
    kept = {n: torch.tensor([x == n for x in names]) & (case.weights > 0) for n in set(names) - {"LI"}}
    return {n: float(case.logits[k].sum() / case.labels[k].sum()) for n, k in kept.items()}
