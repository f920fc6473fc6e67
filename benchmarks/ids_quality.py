"""AUC on MovieLens-1M with managed ids and no vocabulary, against hashing into the same rows.

    make bench-ids-quality DATA=DIR    (python benchmarks/ids_quality.py DIR [--seeds 5])

DIR is a folder with ml-1m/pairs.parquet: userID and movieID, both text, one row for each of 1,000,209
ratings. It has no stars, so what is predicted is which film a user has rated: each pair is a positive, beside
one film drawn evenly from those that this user has not rated. A tenth of the pairs, chosen by a hash, are for
the test.
The model is `mf` with 16 numbers, one epoch in batches of 4,096 rows, in one process.

- vocabulary: users and films numbered before, one row each, and one more.
- numbers: managed ids, which are those numbers, in tables of the same rows: the very same model.
- managed: managed ids, which are the texts. Where there are fewer rows than ids, one that was seen five times
  gets a row, those seen least often lose theirs (lfu), and a tenth of the rows is for the fallback.
- lru: the same as by default: a row at once, and those not seen for longest lose theirs.
- hashed: the texts, hashed into the same rows.

Prints a table; writes benchmarks/results/ids_quality.json and the table in docs/benchmarks.md. What that file
has is not measured again.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated, Any

import numpy as np
import typer
from documents import fill, keep
from quality_sources import write_sources
from rank_group import join_group

RESULTS = Path(__file__).parent / "results" / "ids_quality.json"
BATCH, DIM = 4096, 16
SIDES = (
    ("vocabulary", 1.0),
    ("numbers", 1.0),
    ("managed", 1.0),
    ("hashed", 1.0),
    ("managed", 0.5),
    ("lru", 0.5),
    ("hashed", 0.5),
    ("managed", 0.1),
    ("lru", 0.1),
    ("hashed", 0.1),
)
KINDS: dict[str, dict[str, Any]] = {  # with managed ids → their policy where there are fewer rows than ids
    "numbers": {},
    "managed": {"eviction": "lfu", "admit_after": 5},
    "lru": {},
}


class Ratings:
    """Pairs as numbers, and the texts that these are of.

    Attributes:
        texts: of users and of films, in the order of their numbers.
        train, test: int64 [n, 2], pairs.
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
        """(pairs [2 n, 2] with one that is drawn beside each, labels float32 [2 n]), shuffled."""
        random = np.random.default_rng(seed)
        drawn = pairs.copy()
        again = np.arange(len(drawn))
        while len(again):
            drawn[again, 1] = random.integers(0, self._films, len(again))
            places = drawn[again, 0] * self._films + drawn[again, 1]
            found = np.searchsorted(self._rated, places).clip(max=len(self._rated) - 1)
            again = again[self._rated[found] == places]
        order = random.permutation(2 * len(pairs))
        labels = np.repeat(np.float32([1, 0]), len(pairs))
        return np.concatenate([pairs, drawn])[order], labels[order]


def auc_of(ratings: Ratings, kind: str, share: float, seed: int) -> float:
    """Of the test pairs, after one epoch."""
    import torch
    from sklearn.metrics import roc_auc_score

    from raytrec.config.run_config import RunConfig
    from raytrec.config.schema import Schema
    from raytrec.data.form import Form, ReadPlan
    from raytrec.data.ids import hash_text, hash_text_bits
    from raytrec.worker.build import build_step

    rows = {name: int(len(t) * share) + 1 for name, t in zip(("user", "item"), ratings.texts, strict=True)}
    tables: dict[str, dict[str, Any]] = {name: {"rows": n, "dim": DIM} for name, n in rows.items()}
    for table in tables.values() if kind in KINDS else ():
        fallback = {"fallback_rows": max(1, table["rows"] // 10)}
        table["ids"] = KINDS[kind] | fallback if share < 1 else "managed"
    sparse = {name: {"table": name} for name in tables}
    schema = Schema.parse({"labels": ["y"], "sparse": sparse, "tables": tables}, "ids")
    config = RunConfig.model_validate(
        {
            "run": {"seed": seed},
            "data": {"train": "unused", "global_batch_size": BATCH},
            "model": {"name": "mf"},
            "optim": {"embeddings": {"name": "adagrad", "lr": 0.1}, "dense": {"lr": 0.01}},
        }
    )
    codes = [np.arange(len(texts)) for texts in ratings.texts]
    if kind in ("managed", "lru"):
        codes = [hash_text_bits(texts).view(np.int64) for texts in ratings.texts]
    elif kind == "hashed":
        codes = [hash_text(texts, n) for texts, n in zip(ratings.texts, rows.values(), strict=True)]
    torch.manual_seed(seed)
    step, _ = build_step(config, schema, torch.device("cpu"))
    train, labels = ratings.rows(ratings.train, seed)
    for _ in step.train(_batches(Form(ReadPlan(schema)), codes, train, labels), -(-len(labels) // BATCH)):
        pass
    test, labels = ratings.rows(ratings.test, 10_000)
    logits = [
        outputs.tasks["y"].logits[: int(outputs.rows.sum())].numpy()
        for outputs in step.evaluate(_batches(Form(ReadPlan(schema)), codes, test, labels))
    ]
    return float(roc_auc_score(labels, np.concatenate(logits)))


def _batches(form: Any, codes: list[np.ndarray], pairs: np.ndarray, labels: np.ndarray) -> Iterator[Any]:
    from raytrec.data.batch import Collator
    from raytrec.data.canonical import canonical_table
    from raytrec.data.pieces import Rows

    collate = Collator(form)
    for number, first in enumerate(range(0, len(labels), BATCH)):
        some = slice(first, first + BATCH)
        ids, count = [c[pairs[some, i]] for i, c in enumerate(codes)], len(labels[some])
        rows = Rows.of(canonical_table(form, [labels[some]], [], ids, [], count).to_batches()[0])
        yield collate([rows], BATCH, count, number)


def document(found: dict[str, list[float]]) -> str:
    """A line for each side, as Markdown."""
    lines = [
        "| ids | rows ÷ distinct ids | AUC, mean | standard deviation | seeds |",
        "|---|---|---|---|---|",
    ]
    for kind, share in SIDES:
        if values := found.get(f"{kind} {share:g}"):
            spread = stdev(values) if len(values) > 1 else 0.0
            lines.append(f"| {kind} | {share:.0%} | {mean(values):.5f} | {spread:.5f} | {len(values)} |")
    return "\n".join(lines)


def main(
    data: Annotated[Path | None, typer.Argument(help="Folder with ml-1m/pairs.parquet.")] = None,
    seeds: Annotated[int, typer.Option(help="Seeds of each side.")] = 5,
    smallest: Annotated[
        bool, typer.Option("--smallest", help="A seed on made-up data; writes nothing.")
    ] = False,
) -> None:
    """Prints the table; writes benchmarks/results/ids_quality.json."""
    with tempfile.TemporaryDirectory() as folder:
        join_group(0, 1, f"{folder}/store")
        if smallest:
            data = Path(folder)
            write_sources(data)
        elif data is None:
            raise typer.BadParameter("the folder with ml-1m/pairs.parquet is missing", param_hint="DATA")
        ratings = Ratings(data)
    found: dict[str, list[float]] = {}
    if RESULTS.exists() and not smallest:
        found = json.loads(RESULTS.read_text())
    for seed in range(1 if smallest else seeds):
        for kind, share in SIDES:
            values = found.setdefault(f"{kind} {share:g}", [])
            if len(values) > seed:
                continue
            values.append(auc_of(ratings, kind, share, seed))
            print(f"seed {seed}, {kind}, {share:.0%}: {values[-1]:.5f}", flush=True)
            if not smallest:
                keep(RESULTS, found)
    print(document(found))
    if not smallest:
        fill("docs/benchmarks.md", "ids_quality", document(found))


if __name__ == "__main__":
    typer.run(main)
