"""Data fingerprints depend only on file contents; resume compares them."""

import json
import os
import shutil
from dataclasses import asdict, replace

import parquet
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from checkpoints import write_index_only

from raytrec.common.errors import DataError
from raytrec.config.schema import Schema
from raytrec.config.transforms import LookupVocabulary
from raytrec.data.files import file_identity
from raytrec.data.files.file_identity import FileIdentity, fingerprint, identify_files
from raytrec.data.fragments import scan
from raytrec.data.read_plans import ReadPlan
from raytrec.driver.resume import check_same_data, record_data
from raytrec.report.report import build
from raytrec.tracking.run_folder import DATA, FILES_KEY, RunFolder


@pytest.fixture
def folder(tmp_path):
    folder = parquet.write_dataset(tmp_path / "d", train=600, valid=50, test=50)
    for path in folder.glob("*/*.parquet"):
        pq.write_table(pq.read_table(path), path, row_group_size=300, compression="none")
    return folder


def scan_dataset(folder, name="train", **options):
    return scan(str(folder / name), ReadPlan(Schema.load(folder / "schema.yaml"), **options))


def flip_labels(path):
    """Rewrite a file with flipped labels; rows, bytes, names and statistics stay the same."""
    table = pq.read_table(path)
    flipped = pc.subtract(pa.scalar(1, pa.int8()), table["label"])
    pq.write_table(table.set_column(0, "label", flipped), path, row_group_size=300, compression="none")


@pytest.fixture(params=[True, False], ids=["whole files", "samples"])
def whole(request, monkeypatch):
    """Return True if files are hashed completely, False if in samples."""
    if not request.param:
        monkeypatch.setattr(file_identity, "MAX_FULL_HASH_BYTES", 0)
        monkeypatch.setattr(file_identity, "SAMPLES", 4)
    return request.param


def test_flipped_labels_change_the_fingerprint(folder, whole):
    """Only the dictionary of the column may change; the file size and the footer stay the same."""
    path = folder / "train/part-0.parquet"
    before, footer = identify_files(scan_dataset(folder)), pq.read_metadata(path)
    flip_labels(path)
    after = identify_files(scan_dataset(folder))
    assert pq.read_metadata(path).equals(footer), "the footer must not reveal the change"
    assert [old == new for old, new in zip(before, after, strict=True)] == [False, True]
    assert before[0].whole == whole
    assert fingerprint(before) != fingerprint(after)
    assert file_identity.list_differences(before, after) == [
        "part-0.parquet: the same number of rows and bytes, but different values"
    ]


def test_copied_files_have_the_same_fingerprint(folder, tmp_path, whole):
    before = identify_files(scan_dataset(folder))
    shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copyfile)
    for path in (tmp_path / "copy/train").iterdir():
        os.utime(path, (1, 1))
    after = identify_files(scan_dataset(tmp_path / "copy"))
    assert fingerprint(after) == fingerprint(before) and not file_identity.list_differences(before, after)
    said = file_identity.list_rewritten_files(before, after)
    assert said == ([] if whole else ["part-0.parquet", "part-1.parquet"]), "samples prove no equality"
    assert file_identity.list_rewritten_files(before, identify_files(scan_dataset(folder))) == []
    assert [FileIdentity(**json.loads(json.dumps(asdict(c)))) for c in before] == before


def test_differences_lists_each_changed_file(folder):
    before = identify_files(scan_dataset(folder))
    table = pq.read_table(folder / "train/part-0.parquet")
    pq.write_table(table.slice(0, 200), folder / "train/part-0.parquet", row_group_size=100)
    pq.write_table(table, folder / "train/part-2.parquet")
    (folder / "train/part-1.parquet").unlink()
    assert file_identity.list_differences(before, identify_files(scan_dataset(folder))) == [
        "part-1.parquet: removed",
        "part-2.parquet: added",
        "part-0.parquet: 200 rows in 2 row groups, previously 300 in 1",
    ]
    first, second = (replace(before[0], groups=[[0, a], [1, 9 - a]]) for a in (4, 5))
    assert first.describe_difference(second).endswith("but different sizes of row groups")
    assert first.describe_difference(replace(second, groups=[[0, 1]])) == "1 row in 1 row group, previously 9 in 2"


def test_changed_vocabulary_is_a_data_difference(folder, tmp_path):
    (tmp_path / "words").write_text("1\n2\n")
    transform = LookupVocabulary(do="lookup_vocabulary", columns=["user"], vocabulary=str(tmp_path / "words"))
    dataset = scan_dataset(folder, transforms=(transform,))
    before = identify_files(dataset)
    (tmp_path / "words").write_text("2\n1\n")
    assert file_identity.list_differences(before, identify_files(dataset)) == [
        "data.transforms[0].vocabulary: the same number of bytes, but different values"
    ]


def test_number_of_samples_is_limited(folder, monkeypatch):
    """Each file gets few samples, from different columns and row groups per file."""
    monkeypatch.setattr(file_identity, "MAX_FULL_HASH_BYTES", 0)
    path = folder / "train/part-0.parquet"
    size, form = path.stat().st_size, scan_dataset(folder).form
    with open(path, "rb") as file:
        footer = file_identity._read_raw_footer(pa.PythonFile(file), size)
    pieces = [file_identity._choose_samples(footer, size, form, 2, number) for number in range(8)]
    assert all(len(each) == 2 for each in pieces) and len({p for each in pieces for p in each}) > 3
    many = file_identity._choose_samples(footer, size, form, 100, 0)
    assert len(many) == 100, "samples at column starts and across the whole file"
    assert all(0 < n <= file_identity.SAMPLE_BYTES and at + n <= size for at, n in sum(pieces, many))


class Run:
    """A run folder with one checkpoint, reduced to the files that `check_same_data` reads."""

    def __init__(self, place, data):
        self.folder, self.data, self.root = place, data, place / "checkpoints"
        place.mkdir()
        (place / "schema.yaml").write_text(Schema.load(data / "schema.yaml").to_yaml())
        datasets, found = self._now()
        write_index_only(self.root, 3, data=fingerprint(found["train"]))
        record_data(place, datasets, found)

    def _now(self):
        datasets = {name: scan_dataset(self.data, name) for name in ("train", "valid", "test")}
        return datasets, file_identity.identify_datasets(datasets)

    def check(self):
        schema = Schema.load(self.data / "schema.yaml")
        return check_same_data(self.folder, str(self.root), schema, *self._now())


def test_resume_rejects_changed_labels(folder, tmp_path):
    run = Run(tmp_path / "run", folder)
    assert run.check() == []
    flip_labels(folder / "train/part-1.parquet")
    with pytest.raises(DataError) as error:
        run.check()
    assert "part-1.parquet: the same number of rows and bytes, but different values" in str(error.value)
    assert "--warm-start" in error.value.do
    (run.folder / DATA).write_text("[")  # resume is rejected without the list of files as well
    with pytest.raises(DataError, match=r"data\.train has changed since"):
        run.check()


def test_run_folder_and_report_list_skipped_files(folder, tmp_path):
    (folder / "train/_SUCCESS").touch()
    (folder / "train/notes.txt").write_text("of the export")
    run = Run(tmp_path / "run", folder)
    text = "2 Parquet files; left out: 1 hidden (_SUCCESS), 1 not Parquet (notes.txt)"
    assert RunFolder.read(run.folder).files[0] == f"train: {text}"
    noted = json.loads((run.folder / DATA).read_text())[FILES_KEY]["train"]
    assert noted["counts"] == {"read": 2, "hidden": 1, "not Parquet": 1}
    assert noted["left_out"]["not Parquet"] == [str(folder / "train/notes.txt")]
    assert text in build(run.folder)[0].read_text() and run.check() == []


def test_resume_warns_about_changed_evaluation_data(folder, tmp_path):
    run = Run(tmp_path / "run", folder)
    flip_labels(folder / "test/part-0.parquet")
    (line,) = run.check()
    assert "data.test has changed since" in line and "part-0.parquet" in line
