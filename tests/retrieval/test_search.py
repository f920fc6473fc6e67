"""Search over vectors: exact search compared with sorting all scores, and search with faiss."""

import json
from hashlib import sha256
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytrec.common.documents import to_json_document
from raytrec.common.errors import ConfigError, RunError
from raytrec.retrieval import index as searched
from raytrec.retrieval.build import build_faiss
from raytrec.retrieval.index import FAISS_FILE, MANIFEST, Index, load_index, require_faiss

WIDTH = 6


def draw_vectors(rows, seed, ties=False):
    draw = np.random.default_rng(seed)
    found = draw.integers(-2, 3, (rows, WIDTH)) if ties else draw.normal(size=(rows, WIDTH))
    return found.astype(np.float32)


@pytest.mark.parametrize("ties", [True, False])
@pytest.mark.parametrize("queries, cells", [(2, 30), (100, 1 << 22)])
@pytest.mark.parametrize("k", [1, 7, 50])
def test_exact_search_matches_sorting_all_scores(ties, queries, cells, k):
    items, asked = draw_vectors(50, 0, ties), draw_vectors(9, 1, ties)
    items[4], items[5], asked[0] = np.nan, -0.0, 0
    with patch.multiple(searched, BLOCK_QUERIES=queries, BLOCK_SCORES=cells):
        rows, scores = searched.search_exactly(items, asked, k)
    whole = (asked.astype(np.float64) @ items.T.astype(np.float64)).astype(np.float32)
    order = np.argsort(-whole, axis=1, kind="stable")[:, :k]  # NaN last; ties keep the row order
    assert np.array_equal(rows, order)
    np.testing.assert_array_equal(scores, np.take_along_axis(whole, order, 1))


def serialize_faiss(faiss):
    return require_faiss().serialize_index(faiss).tobytes()


def make_film_index(faiss=None):
    items = draw_vectors(50, 0)
    table = pa.table({"item": [f"film {i}" for i in range(50)], "year": np.arange(50)})
    return Index(table, items, "item", {"item": "item", "faiss": faiss}, faiss and build_faiss(faiss, items))


def test_flat_faiss_matches_exact_search():
    exactly, flat, asked = make_film_index(), make_film_index("Flat"), draw_vectors(9, 1)
    for k in (3, 50):
        assert np.array_equal(flat.nearest(asked, k)[0], exactly.nearest(asked, k)[0])


@pytest.mark.parametrize("faiss", [None, "Flat", "IVF4,Flat"])
def test_search_fills_up_after_leaving_out_items(faiss):
    films, asked = make_film_index(faiss), draw_vectors(2, 1)
    rows, _ = films.nearest(asked, 8)
    seen = [f"film {row}" for row in rows[0][:3]] + ["a film that is not there"]
    found = films.search(asked, 5, leave_out=[seen, None])
    kept = np.append(rows[0][3:8], rows[1][:5])
    kept = kept[kept >= 0]
    assert found["item"].tolist() == [f"film {row}" for row in kept]
    assert found["year"].tolist() == kept.tolist() and set(found["query"]) == {0, 1}
    assert found[found["query"] == 0]["rank"].tolist() == list(range(1, (found["query"] == 0).sum() + 1))
    with pytest.raises(ConfigError, match="length of leave_out is 1, but the number of queries is 2"):
        films.search(asked, 5, leave_out=[seen])


def test_search_accepts_one_vector_and_large_k():
    films = make_film_index()
    found = films.search(draw_vectors(1, 3)[0], 1000)
    assert len(found) == 50 and sorted(found["item"]) == sorted(films.items["item"].to_pylist())
    assert len(films.search(np.empty((0, WIDTH)))) == 0


@pytest.mark.parametrize("k", [0, -1, 2.5, True])
def test_search_requires_a_positive_integer_k(k):
    with pytest.raises(ConfigError, match="k is "):
        make_film_index().search(draw_vectors(1, 3), k)


def test_unsupported_faiss_index_raises_a_clear_error():
    with pytest.raises(ConfigError, match="faiss cannot build index 'Nonsense' of 50 vectors of width 6"):
        build_faiss("Nonsense", draw_vectors(50, 0))
    with pytest.raises(ConfigError, match="--faiss"):
        build_faiss("PQ4", draw_vectors(50, 0))  # 4 does not divide the width


@pytest.fixture
def folder(tmp_path):
    """Write an index of 50 films and one unreadable item, as `raytrec index` does."""
    films = make_film_index("Flat")
    (tmp_path / "items").mkdir()
    listed = pa.array([*films.vectors.tolist(), None], pa.list_(pa.float32()))
    table = pa.concat_tables([films.items, films.items.slice(0, 1)]).append_column("vector", listed)
    pq.write_table(
        table, tmp_path / "items/part-0.parquet", row_group_size=20, write_page_checksum=True, compression="zstd"
    )
    data = serialize_faiss(films.faiss)
    (tmp_path / FAISS_FILE).write_bytes(data)
    written = {"index.items": 50, "index.faiss_sha256": sha256(data).hexdigest()}
    (tmp_path / MANIFEST).write_bytes(to_json_document({"format": 1, "item": "item", "faiss": "Flat", **written}))
    return tmp_path


def test_loaded_index_equals_the_written_index(folder):
    films, same = make_film_index("Flat"), load_index(folder)
    assert np.array_equal(same.vectors, films.vectors) and same.items.equals(films.items)
    assert same.faiss.ntotal == len(same) == 50 and same.key == "item"
    assert repr(same) == "<Index: 50 items × 6, Flat>"
    (folder / MANIFEST).unlink()
    with pytest.raises(RunError, match="there is no index in this folder"):
        load_index(folder)
    for text in ("[", json.dumps({"format": 99, "item": "item"}), '{"format": 1}'):
        (folder / MANIFEST).write_text(text)
        with pytest.raises(RunError, match=MANIFEST):
            load_index(folder)


@pytest.mark.parametrize("name", [MANIFEST, FAISS_FILE, "items/part-0.parquet"])
def test_damaged_index_raises_an_error_or_loads_unchanged(folder, name):
    """Truncate files or flip bits."""
    before, draw = load_index(folder), np.random.default_rng(5)
    data, refused = (folder / name).read_bytes(), 0
    for attempt in range(60):
        changed = bytearray(data)
        if attempt % 3:
            changed[draw.integers(len(data))] ^= 1 << draw.integers(8)
        else:
            changed = changed[: draw.integers(len(data))]
        (folder / name).write_bytes(changed)
        try:
            after = load_index(folder)
        except RunError:
            refused += 1
        else:
            assert np.array_equal(after.vectors, before.vectors)
    assert refused >= 20


def test_index_without_a_file_or_column_is_refused(folder):
    table = pq.read_table(folder / "items/part-0.parquet")
    for changed, words in (
        (table.drop(["vector"]), "vector"),
        (table.drop(["item"]), "column 'item' is missing from items"),
        (table.slice(0, 20), "items has 20 vectors, but index.json lists 50"),
        (table.set_column(2, "vector", pa.array(range(51))), "list"),
        (table.set_column(2, "vector", pa.array([[0.0] * (1 + i % 2) for i in range(51)])), "reshape"),
        (None, "no Parquet files"),
    ):
        (folder / "items/part-0.parquet").unlink()
        if changed is not None:
            pq.write_table(changed, folder / "items/part-0.parquet")
        with pytest.raises(RunError, match=f"the index cannot be loaded: .*{words}"):
            load_index(folder)
    pq.write_table(table, folder / "items/part-0.parquet")
    (folder / FAISS_FILE).write_bytes(serialize_faiss(build_faiss("Flat", draw_vectors(50, 2))))
    with pytest.raises(RunError, match=r"index\.faiss does not match the checksum in index\.json"):
        load_index(folder)
    (folder / FAISS_FILE).unlink()
    with pytest.raises(RunError, match="the index cannot be loaded"):
        load_index(folder)


@pytest.mark.parametrize("keys", [["a film", 2.5], "7", 7, [2**70], [None]])
def test_leave_out_keys_of_another_type_are_refused(keys):
    films = Index(pa.table({"item": np.arange(50)}), draw_vectors(50, 0), "item")
    with pytest.raises(ConfigError, match="leave_out contains") as error:
        films.search(draw_vectors(2, 1), 5, leave_out=[[1, 2], keys])
    assert "column item (int64)" in error.value.expected
    assert 7 not in films.search(draw_vectors(1, 1), 50, leave_out=[[7]])["item"].tolist()
