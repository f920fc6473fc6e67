"""Ranking and group metrics on 1, 2 and 3 ranks, compared with scikit-learn and reference code."""

import tempfile
from math import isnan

import numpy as np
import pytest
import torch
from evaluations import Case, evaluations
from ranks import run_on_ranks
from sklearn import metrics as sk

from raytrec.common.collectives import Peers
from raytrec.common.errors import RunError
from raytrec.metrics.groups import GroupRows
from raytrec.metrics.ranked import BIN_COUNT, RankedRows, Ties, assign_bins, compute_midpoints
from raytrec.metrics.registry import find_metric
from raytrec.tasks.outputs import TaskOutputs

ROWS, GROUPS = 500, 40
GROUP_METRICS = ["gauc", "recall@1", "recall@5", "ndcg@5", "ndcg@100", "hit_rate@3", "mrr", "map@3", "map@50"]
GROUP_METRICS += ["coverage@2"]
RANKED, SUMMED = ["auc", "pr_auc", "calibration"], ["logloss", "ece", "rmse", "mse", "mae", "accuracy", "ne"]


def rows(seed, ties=True, weights=True, gains=False):
    """Return rows in groups of 1 to 30; some groups have no positive or no negative row; items repeat."""
    draw = torch.Generator().manual_seed(seed)
    groups = (torch.rand(ROWS, generator=draw) ** 2 * GROUPS).long() * 7 - 90
    logits = torch.randn(ROWS, generator=draw) * 2
    logits = (logits * 2).round() / 2 if ties else logits
    labels = (torch.rand(ROWS, generator=draw) < (logits - 1).sigmoid()).float()
    labels[groups == -90], labels[groups == -83] = 0, 1
    if gains:
        labels = labels * torch.randint(0, 4, (ROWS,), generator=draw)
    weight = torch.ones(ROWS)
    if weights:
        weight = (torch.rand(ROWS, generator=draw) * 3).round() / 2 * (groups != -76)
    items = torch.randint(0, 70, (ROWS,), generator=draw) * 2**40
    return {"logits": logits, "labels": labels, "weights": weight, "groups": groups, "items": items}


CASES = {
    "ties, weights and a masked group": Case(**rows(0), metrics=[*RANKED, *GROUP_METRICS, *SUMMED]),
    "no ties, no weights": Case(**rows(1, ties=False, weights=False), metrics=[*RANKED, *GROUP_METRICS, *SUMMED]),
    "gains": Case(**rows(2, gains=True), metrics=["auc", "ndcg@4", "mrr", "calibration"], loss="mse"),
    "equal predictions": Case(**{**rows(3), "logits": torch.ones(ROWS)}, metrics=["auc", "pr_auc", *GROUP_METRICS]),
    "one class": Case(**{**rows(4), "labels": torch.zeros(ROWS)}, metrics=["ne", *RANKED, *GROUP_METRICS]),
    "no row counts": Case(**{**rows(5), "weights": torch.zeros(ROWS)}, metrics=[*RANKED, *SUMMED, *GROUP_METRICS]),
    "a NaN": Case(
        **{**rows(6, weights=False), "logits": torch.ones(ROWS).index_fill(0, torch.tensor([7]), torch.nan)},
        metrics=["auc", "pr_auc", "gauc", "mrr"],
    ),
}
NO_POSITIVE = {*RANKED, "ne", *GROUP_METRICS} - {"coverage@2"}


def compute_reference(case, name):
    """Return the metric by its definition in docs/metrics.md, row by row, or by scikit-learn."""
    kept = case.weights > 0
    p = case.logits[kept].double()
    p = (p.sigmoid() if case.loss == "bce" else p).numpy()
    y, w = case.labels[kept].double().numpy(), case.weights[kept].double().numpy()
    metric, _, k = name.partition("@")
    if metric in ROW_REFERENCES:
        return ROW_REFERENCES[metric](y, p, w)
    groups = case.groups[kept].numpy()
    orders = {g: sorted(np.flatnonzero(groups == g), key=lambda i: (-p[i], y[i])) for g in set(groups)}
    if metric == "coverage":
        items = case.items[kept].numpy()
        return len({items[i] for order in orders.values() for i in order[: int(k)]}) / len(set(items))
    total = norm = 0.0
    for order in orders.values():
        value = GROUP_REFERENCES[metric](y[order], p[order], w[order], int(k or 0))
        if value is not None:
            weight = w[order].sum() if metric == "gauc" else w[order].mean()
            total, norm = total + weight * value, norm + weight
    return total / norm


ROW_REFERENCES = {
    "auc": lambda y, p, w: sk.roc_auc_score(y, p, sample_weight=w),
    "pr_auc": lambda y, p, w: sk.average_precision_score(y, p, sample_weight=w),
    "logloss": lambda y, p, w: sk.log_loss(y, p, sample_weight=w),
    "mse": lambda y, p, w: sk.mean_squared_error(y, p, sample_weight=w),
    "rmse": lambda y, p, w: sk.root_mean_squared_error(y, p, sample_weight=w),
    "mae": lambda y, p, w: sk.mean_absolute_error(y, p, sample_weight=w),
    "accuracy": lambda y, p, w: sk.accuracy_score(y, p > 0.5, sample_weight=w),
    "calibration": lambda y, p, w: (w * p).sum() / (w * y).sum(),
    "ne": lambda y, p, w: (
        sk.log_loss(y, p, sample_weight=w) / sk.log_loss(y, np.full_like(p, (w * y).sum() / w.sum()), sample_weight=w)
    ),
    "ece": lambda y, p, w: (
        sum(abs((w * (p - y))[(p >= b / 15) & (p < (b + 1) / 15)].sum()) for b in range(15)) / w.sum()
    ),
}
GROUP_REFERENCES = {
    "gauc": lambda y, p, w, k: sk.roc_auc_score(y, p, sample_weight=w) if 0 < y.sum() < len(y) else None,
    "recall": lambda y, p, w, k: y[:k].sum() / y.sum() if y.any() else None,
    "hit_rate": lambda y, p, w, k: float(y[:k].any()) if y.any() else None,
    "mrr": lambda y, p, w, k: 1 / (1 + int((y > 0.5).argmax())) if y.any() else None,
    "map": lambda y, p, w, k: (
        sum(y[: i + 1].mean() for i in np.flatnonzero(y[:k])) / min(k, y.sum()) if y.any() else None
    ),
    "ndcg": lambda y, p, w, k: compute_ndcg(y, k) if y.any() else None,
}


def compute_ndcg(gains, k):
    """Return the NDCG of gains in the order of their scores; scikit-learn accepts no list of one row."""
    return sk.ndcg_score([gains], [-np.arange(len(gains))], k=k) if len(gains) > 1 else 1.0


@pytest.fixture(scope="module", params=[1, 2, 3])
def found(request):
    ranks = evaluations(request.param, list(CASES.values()))
    firsts = dict(zip(CASES, ranks[0], strict=True))
    for other in ranks[1:]:  # all ranks have the same metrics; only the first has curves
        for (figures, _), (same, curves) in zip(ranks[0], other, strict=True):
            assert same == pytest.approx(figures, nan_ok=True) and curves is None
    return firsts


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(CASES)[:4])
def test_ranked_metrics_match_their_definitions(found, kind):
    case, (figures, _) = CASES[kind], found[kind]
    wanted = {name: compute_reference(case, name) for name in case.metrics if (kind, name) != ("gains", "auc")}
    assert {name: figures[name] for name in wanted} == pytest.approx(wanted, abs=1e-6)
    assert not any(name.endswith("_bound") for name in figures)


def test_groups_without_metric_are_counted(found):
    case, (figures, _) = (x["ties, weights and a masked group"] for x in (CASES, found))
    kept = case.weights > 0
    of_groups = [case.labels[kept & (case.groups == g)] for g in case.groups[kept].unique()]
    assert figures["groups"] == len(of_groups)
    assert figures["groups_without_positive"] == sum(not y.any() for y in of_groups) > 0
    assert figures["groups_of_one_class"] == sum(len(y.unique()) == 1 for y in of_groups)


def test_undefined_metrics_have_no_value(found):
    assert found["gains"][0]["auc"] is None and found["gains"][1] is None
    for kind in ("one class", "no row counts", "a NaN"):
        figures, curves = found[kind]
        for name in CASES[kind].metrics if kind == "no row counts" else NO_POSITIVE & {*CASES[kind].metrics}:
            assert figures[name] is None or isnan(figures[name]), (kind, name)
        assert curves is None
    assert 0 < found["one class"][0]["coverage@2"] < 1


def test_curves_match_the_rows(found):
    kind = "ties, weights and a masked group"
    case, (_, curves) = CASES[kind], found[kind]
    kept = case.weights > 0
    y, p, w = (x[kept].double().numpy() for x in (case.labels, case.logits.sigmoid(), case.weights))
    fpr, tpr, _ = sk.roc_curve(y, p, sample_weight=w, drop_intermediate=False)
    drawn = np.array([curves["roc"]["fpr"], curves["roc"]["tpr"]]).T
    assert drawn == pytest.approx(np.array([fpr, tpr]).T, abs=1e-6), "with few predictions, each is a point"
    bins = curves["reliability"]
    assert sum(bins["rows"]) == kept.sum() and bins["predicted"] == sorted(bins["predicted"])
    assert curves["roc"]["metric"] == "auc" and curves["reliability"]["metric"] == "calibration"
    _, curves = found["no ties, no weights"]
    fpr, tpr = curves["roc"]["fpr"], curves["roc"]["tpr"]
    assert (fpr[0], tpr[0], fpr[-1], tpr[-1]) == (0, 0, 1, 1) and 190 <= len(fpr) <= 202
    assert np.trapezoid(tpr, fpr) == pytest.approx(found["no ties, no weights"][0]["auc"], abs=0.01)
    assert curves["reliability"]["rows"] == [25] * 20


def test_binned_metric_without_error_bound_is_reported():
    case = CASES["no ties, no weights"]
    case = Case(**{**vars(case), "metrics": ["evaluations:UnboundedAUC", "auc"], "settings": {"max_exact_rows": 40}})
    ((figures, _),) = evaluations(1, [case])[0]
    assert figures["auc_of_user"] == figures["auc"] and "auc_of_user_bound" not in figures


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 3])
def test_binned_metrics_are_within_their_error_bound(world):
    kinds = ("no ties, no weights", "ties, weights and a masked group")
    many = [Case(**{**vars(CASES[kind]), "settings": {"max_exact_rows": 40}}) for kind in kinds]
    for case, (figures, curves) in zip(many, evaluations(world, many)[0], strict=True):
        for name in ("auc", "pr_auc"):
            exact, bound = compute_reference(case, name), figures[f"{name}_bound"]
            assert bound > 0 and abs(figures[name] - exact) <= bound
        assert figures["auc_bound"] < 0.05
        for name in (*GROUP_METRICS, *SUMMED):
            assert figures[name] == pytest.approx(compute_reference(case, name), abs=1e-6), name
        assert sum(curves["reliability"]["rows"]) == (case.weights > 0).sum()


def test_missing_temporary_folder_is_a_run_error(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/gone"])
    rows, zeros = GroupRows(torch.sigmoid, 0, ["user"]), torch.zeros(2)
    with pytest.raises(RunError, match=r"No usable temporary directory found in \['/gone'\]"):
        rows.add(zeros, zeros, zeros + 1, {"user": zeros.long()})


def test_bins_are_monotonic_in_predictions():
    edges = torch.tensor([-torch.inf, -1e30, -1.5, -1.0, -1e-30, 0.0, 1e-30, 0.5, 0.9, 1.0, 1e30, torch.inf])
    bins = assign_bins(edges.double())
    assert (bins[1:] > bins[:-1]).all() and bins.min() >= 0 and bins.max() < BIN_COUNT
    assert assign_bins(torch.tensor([-0.0])) == assign_bins(torch.tensor([0.0]))
    middles = compute_midpoints(bins)
    assert middles.isfinite().all() and (assign_bins(middles) == bins).all()
    assert ((middles - edges).abs() <= edges.abs() / 2**11 + 1e-40)[1:-1].all()


@pytest.mark.slow
def test_ranked_metrics_on_gpu_match_cpu():
    cases = list(CASES.values())[:2]
    expected, on_gpus = evaluations(2, cases)[0], evaluations(2, cases, device="cuda")
    for found in on_gpus:
        for (figures, _), (same, _) in zip(expected, found, strict=True):
            assert same == pytest.approx(figures, nan_ok=True)
    assert [curves for _, curves in on_gpus[0]] == [curves for _, curves in expected]


def parts(rank, world):
    """Return this rank's number of sorted predictions, for different and for equal predictions."""
    rows = (8000, 0, 1000)[rank]
    found = []
    for predictions in (torch.randn(rows).exp(), torch.ones(rows)):
        ranked = RankedRows.sort(Ties.of(predictions, torch.zeros(rows), torch.ones(rows)), Peers())
        found.append(len(ranked.ties.predictions))
        assert ranked.total.tolist() == [0, 9000, 9000]
    return found


def test_sorted_rows_are_distributed_evenly():
    different, same = zip(*run_on_ranks(3, parts), strict=True)
    assert max(different) < 1.1 * sum(different) / 3 and sum(same) == 1


def test_multiclass_metrics_match_scikit_learn():
    draw = torch.Generator().manual_seed(0)
    logits, weights = torch.randn(50, 4, generator=draw), torch.rand(50, generator=draw).round(decimals=1)
    labels = torch.randint(0, 4, (50,), generator=draw).float()
    outputs = TaskOutputs(logits, logits.softmax(1), labels, weights)
    p, y, w = (x.double().numpy() for x in (outputs.predictions, labels, weights))
    wanted = {
        "logloss": sk.log_loss(y, p / p.sum(1, keepdims=True), sample_weight=w),
        "accuracy": sk.accuracy_score(y, p.argmax(1), sample_weight=w),
    }
    for name, value in wanted.items():
        metric = find_metric(name)
        sums = {key: each.double() for key, each in metric.sums(outputs).items()}
        assert float(metric.figure(sums)) == pytest.approx(value, abs=1e-6)
