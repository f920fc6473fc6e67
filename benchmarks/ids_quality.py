"""AUC on MovieLens-1M with managed ids, compared with a vocabulary and with hashing into as many rows.

    make bench-ids-quality DATA=DIR    (python benchmarks/ids_quality.py DIR [--seeds 5])

DIR is a folder with ml-1m/pairs.parquet, which contains userID and movieID as text for each of 1,000,209
ratings. The file contains no stars, so the model predicts whether a user has rated a film: each pair is a
positive, and its negative is a film drawn uniformly from the films that the user has not rated. A hash selects a
tenth of the pairs for testing. The model is `mf` with dim 16, trained for one epoch in batches of 4,096 rows in
one process.

- vocabulary: users and films that are numbered in advance, with one row for each and one additional row in
  each table.
- numbers: managed ids that are these numbers, in tables with as many rows; the same model.
- managed: managed ids that are the texts. With fewer rows than ids, an id gets a row after five occurrences,
  and the least frequent ids lose their rows (lfu). A tenth of the rows is for the fallback.
- lru: as managed, with the default policy: an id gets a row immediately, and the ids not seen for the longest
  time lose their rows.
- hashed: the texts, hashed into as many rows.

Writes benchmarks/results/ids_quality.json and the table in docs/benchmarks.md. Seeds with stored results are not
measured again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated, Any

import harness
import numpy as np
import typer
from harness import Grid
from quality_sources import write_sources
from rank_group import Rig, join_group, rig

BATCH, DIM = 4096, 16
SIDES = (
    *((kind, 1.0) for kind in ("vocabulary", "numbers", "managed", "hashed")),
    *((kind, share) for share in (0.5, 0.1) for kind in ("managed", "lru", "hashed")),
)
# Kind of managed ids → policy if there are fewer rows than ids.
KINDS: dict[str, dict[str, Any]] = {"numbers": {}, "managed": {"eviction": "lfu", "admit_after": 5}, "lru": {}}
OPTIM = {"embeddings": {"name": "adagrad", "lr": 0.1}, "dense": {"lr": 0.01}}


class Ratings:
    """Numbered users and films of all rated pairs.

    Attributes:
        texts: Texts of users, and texts of films, in the order of their numbers.
        train: (user, film) of each training pair, int64 [n, 2].
        test: (user, film) of each test pair, int64 [n, 2].
    """

    def __init__(self, data: Path):
        import pyarrow.parquet as pq

        from raytrec.data.ids import hash_bits

        table = pq.read_table(data / "ml-1m" / "pairs.parquet", columns=["userID", "movieID"])
        columns = [table[name].combine_chunks().dictionary_encode() for name in table.column_names]
        self.texts = [column.dictionary for column in columns]
        pairs = np.stack([column.indices.to_numpy().astype(np.int64) for column in columns], 1)
        self._films = len(self.texts[1])
        places = pairs[:, 0] * self._films + pairs[:, 1]
        self._rated = np.sort(places)
        for_test = hash_bits(places.astype(np.uint64)) % np.uint64(10) == 0
        self.train, self.test = pairs[~for_test], pairs[for_test]

    def rows(self, pairs: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Return pairs and as many random negatives, int64 [2n, 2], and labels, float32 [2n]; shuffled."""
        random = np.random.default_rng(seed)
        drawn = pairs.copy()
        again = np.arange(len(drawn))
        while len(again):
            drawn[again, 1] = random.integers(0, self._films, len(again))
            places = drawn[again, 0] * self._films + drawn[again, 1]
            positions = np.searchsorted(self._rated, places).clip(max=len(self._rated) - 1)
            again = again[self._rated[positions] == places]
        order = random.permutation(2 * len(pairs))
        labels = np.repeat(np.float32([1, 0]), len(pairs))
        return np.concatenate([pairs, drawn])[order], labels[order]


def auc_of(ratings: Ratings, kind: str, share: float, seed: int) -> float:
    """Train for one epoch, and return the AUC on the test pairs.

    Args:
        ratings: Users and films.
        kind: Kind of ids; see the module docstring.
        share: Number of rows of each table ÷ number of its distinct ids.
        seed: Seed of the model and of the negatives in training.
    """
    import torch
    from sklearn.metrics import roc_auc_score

    from raytrec.data.ids import hash_text, hash_text_bits

    rows = {name: int(len(t) * share) + 1 for name, t in zip(("user", "item"), ratings.texts, strict=True)}
    tables: dict[str, dict[str, Any]] = {name: {"rows": n, "dim": DIM} for name, n in rows.items()}
    for table in tables.values() if kind in KINDS else ():
        fallback = {"fallback_rows": max(1, table["rows"] // 10)}
        table["ids"] = KINDS[kind] | fallback if share < 1 else "managed"
    codes = [np.arange(len(texts)) for texts in ratings.texts]
    if kind in ("managed", "lru"):
        codes = [hash_text_bits(texts).view(np.int64) for texts in ratings.texts]
    elif kind == "hashed":
        codes = [hash_text(texts, n) for texts, n in zip(ratings.texts, rows.values(), strict=True)]
    torch.manual_seed(seed)
    schema = {"sparse": {name: {"table": name} for name in tables}, "tables": tables}
    rank_rig = rig(schema, {"name": "mf"}, 1, BATCH, run={"seed": seed}, optim=OPTIM)
    train, labels = ratings.rows(ratings.train, seed)
    for _ in rank_rig.step.train(_batches(rank_rig, codes, train, labels), -(-len(labels) // BATCH)):
        pass
    test, labels = ratings.rows(ratings.test, 10_000)
    logits = [
        outputs.tasks["y"].logits[: int(outputs.rows.sum())].numpy()
        for outputs in rank_rig.step.evaluate(_batches(rank_rig, codes, test, labels))
    ]
    return float(roc_auc_score(labels, np.concatenate(logits)))


def _batches(rank_rig: Rig, codes: list[np.ndarray], pairs: np.ndarray, labels: np.ndarray) -> Iterator[Any]:
    for number, first in enumerate(range(0, len(labels), BATCH)):
        some = slice(first, first + BATCH)
        ids, count = [c[pairs[some, i]] for i, c in enumerate(codes)], len(labels[some])
        piece = rank_rig.piece([labels[some]], ids)
        yield rank_rig.collate([piece], BATCH, count, number)


def document(results: dict[str, list[float]]) -> str:
    """Return the table for docs/benchmarks.md, with a row for each kind and a column for each number of rows."""
    shares = list(dict.fromkeys(share for _, share in SIDES))

    def cell(kind: str, share: float) -> str:
        if not (values := results.get(f"{kind} {share:g}")):
            return ""
        return f"{mean(values):.4f} ± {stdev(values) if len(values) > 1 else 0.0:.4f}"

    rows = [[kind, *(cell(kind, share) for share in shares)] for kind in dict.fromkeys(kind for kind, _ in SIDES)]
    return Grid(("AUC by rows ÷ distinct ids", *(f"{share:.0%}" for share in shares)), rows).markdown()


def main(
    data: Annotated[Path | None, typer.Argument(help="Folder with ml-1m/pairs.parquet.")] = None,
    seeds: Annotated[int, typer.Option(help="Number of seeds for each side.")] = 5,
    smallest: harness.Smallest = False,
) -> None:
    """Print the table; without --smallest, write benchmarks/results/ids_quality.json and docs/benchmarks.md."""
    with tempfile.TemporaryDirectory() as folder:
        join_group(0, 1, f"{folder}/store")
        if smallest:
            data = Path(folder)
            write_sources(data)
        elif data is None:
            raise typer.BadParameter("the folder with ml-1m/pairs.parquet is missing", param_hint="DATA")
        ratings = Ratings(data)
    results: dict[str, list[float]] = {} if smallest else harness.load("ids_quality")
    for seed in range(1 if smallest else seeds):
        for kind, share in SIDES:
            values = results.setdefault(f"{kind} {share:g}", [])
            if len(values) > seed:
                continue
            values.append(auc_of(ratings, kind, share, seed))
            print(f"seed {seed}, {kind}, {share:.0%}: {values[-1]:.5f}", flush=True)
            if not smallest:
                harness.store("ids_quality", results)
    print(document(results))
    if not smallest:
        harness.fill(harness.BENCHMARKS_PAGE, "ids_quality", document(results))


if __name__ == "__main__":
    typer.run(main)
