"""HR@k and NDCG@k of predictions for given candidates, with pandas alone.

python -m raytrec_datasets.movielens.ranking scores --k 10
"""

from __future__ import annotations

import argparse

import numpy as np
import pandas as pd


def ranking(frame: pd.DataFrame, k: int, user: str, label: str, score: str) -> dict[str, float]:
    """Figures of the users that have a row with label 1, of which each counts once.

    Args:
        frame: rows with columns user, label (0 or 1) and score; rows without a score do not count.
    """
    frame = frame[frame[score].notna()]
    ranked = frame.sort_values([user, score, label], ascending=[True, False, True])  # ties against the model
    rank = ranked.groupby(user).cumcount()
    seen = ranked[label] > 0
    hit = seen & (rank < k)
    gain = (1 / np.log2(rank + 2)).where(hit, 0.0).groupby(ranked[user]).sum()
    positives = seen.groupby(ranked[user]).sum()
    best = np.cumsum(1 / np.log2(np.arange(2, k + 2)))
    able = positives > 0
    ideal = best[np.minimum(positives[able], k).astype(int) - 1]
    return {
        "users": int(able.sum()),
        f"HR@{k}": float((hit.groupby(ranked[user]).sum()[able] > 0).mean()),
        f"NDCG@{k}": float((gain[able] / ideal).mean()),
    }


def main() -> None:
    """Prints the figures of a folder of predictions."""
    parser = argparse.ArgumentParser(description="HR@k and NDCG@k of predictions for given candidates.")
    parser.add_argument("folder", help="what `raytrec predict` wrote")
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--user", default="user_id", help="the column that rows are ranked within")
    parser.add_argument("--label", default="label")
    parser.add_argument("--score", default="score")
    given = parser.parse_args()
    frame = pd.read_parquet(given.folder, columns=[given.user, given.label, given.score])
    for name, value in ranking(frame, given.k, given.user, given.label, given.score).items():
        print(f"{name:10} {value:,}" if isinstance(value, int) else f"{name:10} {value:.6f}")


if __name__ == "__main__":
    main()
