"""HR@k and NDCG@k of predictions against their definition, row by row."""

import random
import subprocess
import sys
from math import log2

import pandas as pd
import pytest
from raytrec_datasets.movielens.ranking import ranking


def plain(rows, k):
    """(share of users with a positive row among their k best, mean of DCG ÷ that of the best order)."""
    hits, gains = [], []
    for user in {user for user, *_ in rows}:
        mine = [(label, score) for u, label, score in rows if u == user and score is not None]
        if not any(label for label, _ in mine):
            continue
        mine.sort(key=lambda row: (-row[1], row[0]))
        places = [place for place, (label, _) in enumerate(mine) if label and place < k]
        hits.append(bool(places))
        count = min(k, sum(label for label, _ in mine))
        gains.append(sum(1 / log2(p + 2) for p in places) / sum(1 / log2(p + 2) for p in range(count)))
    return sum(hits) / len(hits), sum(gains) / len(gains)


@pytest.mark.parametrize("k", [1, 3, 10])
def test_figures_are_those_of_the_definition(k):
    chance = random.Random(k)
    rows = [
        (user, int(chance.random() < 0.2), chance.choice([None, *range(6)]))
        for user in range(40)
        for _ in range(chance.randint(1, 12))
    ]
    found = ranking(pd.DataFrame(rows, columns=["u", "y", "s"]), k, "u", "y", "s")
    hit, gain = plain(rows, k)
    assert found[f"HR@{k}"] == pytest.approx(hit) and found[f"NDCG@{k}"] == pytest.approx(gain)


def test_figures_are_those_of_an_evaluation():
    """Whose metrics rank by the same predictions, ties included."""
    import torch

    from raytrec.metrics.over_ranks.groups import Groups
    from raytrec.metrics.registry import find_metric

    chance = random.Random(2)
    rows = [
        (user, int(chance.random() < 0.1), chance.randrange(20) / 16) for user in range(30) for _ in range(40)
    ]
    users, labels, scores = zip(*rows, strict=True)
    values = (torch.tensor(x, dtype=torch.float32) for x in (scores, labels, [1] * len(rows)))
    groups = Groups.make(torch.tensor(users), *values)
    found = ranking(pd.DataFrame(rows, columns=["u", "y", "s"]), 10, "u", "y", "s")
    for name, mine in (("hit_rate@10", "HR@10"), ("ndcg@10", "NDCG@10")):
        figures, counts = find_metric(name).of_groups(groups)
        assert float(figures[counts].mean()) == pytest.approx(found[mine], abs=1e-12), name


def test_the_command(tmp_path):
    frame = pd.DataFrame({"user_id": [1, 1, 2, 2], "label": [1, 0, 0, 1], "score": [0.9, 0.1, 0.8, 0.7]})
    frame.to_parquet(tmp_path / "a.parquet")
    (tmp_path / "_predictions.json").write_text("{}")
    command = [sys.executable, "-m", "raytrec_datasets.movielens.ranking", str(tmp_path), "--k", "1"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert said == ["users", "2", "HR@1", "0.500000", "NDCG@1", "0.500000"]
