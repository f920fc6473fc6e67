"""Build the item vectors and, optionally, the faiss index of `raytrec index`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from raytrec.common.documents import to_json_document
from raytrec.common.errors import ConfigError, RaytrecError, convert_os_errors, get_last_line
from raytrec.common.output_folder import OutputFolder
from raytrec.common.storage import join_uri, make_absolute
from raytrec.config.overrides import Overrides, to_override_texts
from raytrec.data.files.footers import read_footer
from raytrec.data.files.listing import list_files
from raytrec.data.fragments import Dataset
from raytrec.data.order import Part
from raytrec.driver.console import Pairs, Result, RunConsole
from raytrec.driver.datasets import open_inputs, select_tower_schema, to_example_schema
from raytrec.driver.evaluation import Checkpoint, resolve_checkpoint
from raytrec.driver.item_checks import check_item_keys
from raytrec.prediction.folder import VECTOR
from raytrec.prediction.inputs import split_names
from raytrec.prediction.predict import predict
from raytrec.retrieval.index import FAISS_FILE, ITEMS, MANIFEST, Index, read_vectors, require_faiss

RECALL_CUTOFFS = (10, 100)  # values of k for which recall is reported
NUM_RECALL_QUERIES, CONSECUTIVE_QUERIES = (1000, 10)  # queries that measure recall; consecutive rows per sample
MAX_TRAIN_VECTORS = 1 << 18  # maximum number of vectors from which faiss learns clusters and codes
VECTORS_PER_ADD = 1 << 16  # vectors added to a faiss index at a time
RESERVED_COLUMNS = ("query", "rank", "score", VECTOR)  # columns that Index.search and the index add to items


def index(
    place: str | Path,
    items: str,
    out: str,
    *,
    item: str | None = None,
    columns: Sequence[str] | None = None,
    faiss: str | None = None,
    queries: str | None = None,
    workers: int | None = None,
    checkpoint: str | int | None = None,
    overrides: Overrides | None = None,
    allow_code: bool = False,
) -> Result:
    """Compute item vectors with a run's model, and write a searchable index (raytrec.load_index).

    After an interruption, call the function again to continue.

    Args:
        place: Run folder or checkpoint folder, which is only read.
        items: Parquet file or folder of Parquet files, local, s3:// or gs://, with one row per item and the
            columns of the item tower's features.
        out: Folder to write to, local, s3:// or gs://; all nodes must be able to reach it.
        item: Column with a unique key for each item; default: eval.retrieval.item of the run, or else "item".
        columns: Item columns to store in the index; default: all.
        faiss: Specification for faiss.index_factory, such as HNSW32; default: exact search only.
        queries: Parquet file or folder with query rows for measuring the recall of faiss, with the columns of
            the query tower's features; default: the run's data.test, else its data.valid, if readable. Ignored
            without `faiss`.
        workers: As in `predict`.
        checkpoint: As in `predict`.
        overrides: As in `predict`.
        allow_code: As in `predict`.

    Returns:
        Result: Metrics, as in index.json: index.items, index.width, index.faiss (None: exact search only); with faiss,
            index.faiss_sha256; with faiss and queries, index.recall@10 and @100 of faiss (only up to the number of
            items; below 10 items, at their number), index.queries (number of queries) and index.queried (their
            location); item, name, checkpoint, world_size, seconds and the counts of `predict`.

    Raises:
        ConfigError: As in `predict`; or faiss is not installed or rejects the specification, the model has no query
            and item vectors, or the name of an item column is reserved.
        SchemaError: As in `resolve_checkpoint`.
        RunError: As in `predict`; or a file of the index cannot be written.
        DataError: As in `predict`, also for the queries; or an item lacks a key, or two items have the same key.

    Example:
        >>> raytrec.index("runs/films", "items.parquet", "index", item="item_id").metrics["index.items"]
        20
    """
    began, out, items = perf_counter(), make_absolute(str(out)), make_absolute(str(items))
    if faiss:
        require_faiss()
    overrides = to_override_texts(overrides)
    saved = resolve_checkpoint(place, checkpoint, overrides, allow_code)
    saved = replace(saved, schema=to_example_schema(saved.config, saved.schema, items))
    config = saved.config
    key = item or (config.eval.retrieval.item if config.eval.retrieval else "item")
    dataset = _open_queries(saved, queries) if faiss else None
    part = select_tower_schema(config, saved.schema, "item", "raytrec index")
    check_item_keys(open_inputs(config, part, items, "--items", (key,)), key)
    first = list_files(items, "--items").files[0]
    names = split_names(columns) if columns else read_footer(first).schema.to_arrow_schema().names
    stored = list(dict.fromkeys([key, *names]))
    _check_columns(stored)
    options: dict[str, Any] = {"workers": workers, "overrides": overrides, "allow_code": allow_code}
    scored = predict(saved.folder, items, join_uri(out, ITEMS), columns=stored, vectors="item", **options)
    table, vectors = read_vectors(join_uri(out, ITEMS))
    metrics = {"index.items": len(vectors), "index.width": vectors.shape[1], "index.faiss": faiss}
    if faiss:
        with RunConsole(config.run.name) as console:
            console.phase(f"building the {faiss} index of {len(vectors):,} items")
            built = Index(table, vectors, key, faiss=build_faiss(faiss, vectors))
            if dataset:
                console.phase("comparing the index with exact search")
                metrics |= _measure_recall(built, _compute_query_vectors(saved, dataset), dataset.uri)
            data = require_faiss().serialize_index(built.faiss).tobytes()
            _write_file(out, FAISS_FILE, data)
            metrics["index.faiss_sha256"] = sha256(data).hexdigest()
    metrics |= {name: value for name, value in scored.metrics.items() if name not in ("name", "seconds")}
    metrics |= {"name": f"{config.run.name}: {items}", "seconds": round(perf_counter() - began, 3)}
    _write_file(out, MANIFEST, to_json_document({"format": 1, "item": key, "faiss": faiss, **metrics}))
    next_steps = [f"index        {out}", f"search with  raytrec.load_index({out!r}).search(vectors)"]
    return Result({"item": key, **metrics}, out, next_steps, _summarize(metrics))


def _summarize(metrics: dict[str, Any]) -> Pairs:
    pairs = [
        ("items", f"{metrics['index.items']:,}"),
        ("vector width", f"{metrics['index.width']:,}"),
        ("faiss index", metrics["index.faiss"] or "none (exact search)"),
    ]
    for name, value in metrics.items():
        if name.startswith("index.recall@"):
            pairs.append((f"recall of the exact top {name.partition('@')[2]}", f"{value:.4f}"))
    if count := metrics.get("index.queries"):
        pairs.append(("queries for recall", f"{count:,}"))
    return [*pairs, ("seconds", f"{metrics['seconds']:,.1f}")]


def _check_columns(names: list[str]) -> None:
    if reserved := [name for name in names if name in RESERVED_COLUMNS]:
        raise ConfigError(
            f"item column '{reserved[0]}' conflicts with a column that raytrec adds",
            where="--items",
            expected=f"names other than {', '.join(RESERVED_COLUMNS)}",
            do="rename it in the items, or, unless it is the key, list the other columns with --columns",
        )


def _open_queries(saved: Checkpoint, queries: str | None) -> Dataset | None:
    """Return the queries, or None if `queries` is not set and the run's evaluation data is missing or unreadable."""
    config, part = saved.config, select_tower_schema(saved.config, saved.schema, "query", "raytrec index")
    if queries:
        return open_inputs(config, part, make_absolute(str(queries)), "--queries", trained=saved.text_ids)
    places = config.data.test or config.data.valid
    try:
        return open_inputs(config, part, places, "data.test") if places else None
    except RaytrecError:
        return None


def _compute_query_vectors(saved: Checkpoint, dataset: Dataset) -> np.ndarray:
    """Return the query vectors of at most NUM_RECALL_QUERIES rows, which are spread evenly over the dataset."""
    from raytrec.prediction.one_process import compute_outputs, read_batch

    pieces = max(1, min(NUM_RECALL_QUERIES, dataset.rows) // CONSECUTIVE_QUERIES)
    starts = np.arange(pieces) * dataset.rows // pieces
    parts, rows_before = [], 0
    for group in dataset.groups:
        for start in starts[(starts >= rows_before) & (starts < rows_before + group.rows)] - rows_before:
            rows = min(CONSECUTIVE_QUERIES, group.rows - int(start))
            parts.append(Part(group.path, group.index, int(start), rows))
        rows_before += group.rows
    return compute_outputs(saved, read_batch(saved, dataset, parts), "query").numpy()


def build_faiss(spec: str, items_ND: np.ndarray, seed: int = 0) -> Any:
    """Return a faiss index that finds items by their dot products with queries.

    Args:
        spec: Specification for faiss.index_factory, such as HNSW32, "IVF256,Flat" or "OPQ16,IVF256,PQ16".
        items_ND: Item vectors, float32 [N, D].
        seed: Seed for the sample of items that trains the index, if the index needs training.

    Raises:
        ConfigError: faiss is not installed, or rejects the specification for this number and width of vectors.
    """
    faiss = require_faiss()
    try:
        index = faiss.index_factory(items_ND.shape[1], spec, faiss.METRIC_INNER_PRODUCT)
        if not index.is_trained:
            rows = np.random.default_rng(seed).permutation(len(items_ND))[:MAX_TRAIN_VECTORS]
            index.train(np.ascontiguousarray(items_ND[np.sort(rows)]))
        for first in range(0, len(items_ND), VECTORS_PER_ADD):
            index.add(np.ascontiguousarray(items_ND[first : first + VECTORS_PER_ADD]))
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"faiss cannot build index '{spec}' of {len(items_ND):,} vectors of width {items_ND.shape[1]}: "
            f"{get_last_line(str(error), 'no reason given')}",
            where="--faiss",
            expected="a specification for faiss.index_factory that suits these vectors, such as HNSW32",
        ) from None
    return index


def _measure_recall(index: Index, queries: np.ndarray, uri: str) -> dict[str, Any]:
    """Return the recall metrics of `index`: for each k, the share of the exact top k items that faiss finds.

    Args:
        index: Index with a faiss index.
        queries: Query vectors, float32 [Q, D].
        uri: Location of the queries, which is returned as index.queried.
    """
    metrics: dict[str, Any] = {}
    for k in [k for k in RECALL_CUTOFFS if k <= len(index)] or [len(index)]:
        exact, approximate = (index.nearest(queries, k, exact=e)[0] for e in (True, False))
        common = sum(len(np.intersect1d(a, b)) for a, b in zip(exact, approximate, strict=True))
        metrics[f"index.recall@{k}"] = common / exact.size
    return metrics | {"index.queries": len(queries), "index.queried": uri}


def _write_file(out: str, name: str, data: bytes) -> None:
    """Write a file of the index. Raise RunError if the file cannot be written."""
    do = "correct the cause, such as a full disk, and repeat the command; the vectors are kept"
    with convert_os_errors("the index cannot be written", where=join_uri(out, name), do=do):
        OutputFolder(out).write(name, data)
