"""UCI Adult recipe: generated files, compared with a plain Python reading of the same lines."""

import math
import random
import statistics

import pytest
from recipes import get_recipe_error, prepare

from raytrec.common.errors import DataError
from raytrec.config.schema import Schema

CHOICES = {
    "workclass": ["Private", "State-gov", "?"],
    "education": ["HS-grad", "Masters"],
    "marital_status": ["Never-married", "Divorced", "Married-civ-spouse"],
    "occupation": ["Sales", "Tech-support", "?"],
    "relationship": ["Husband", "Own-child"],
    "race": ["White", "Other"],
    "sex": ["Male", "Female"],
    "native_country": ["United-States", "Cuba"],
}
COLUMNS = """age workclass fnlwgt education education_num marital_status occupation relationship race sex
    capital_gain capital_loss hours_per_week native_country income"""


def make_people(rows, seed, **choices):
    rng, choices, people = random.Random(seed), CHOICES | choices, []
    for n in range(rows):
        person = {name: rng.choice(values) for name, values in choices.items()}
        person |= {"age": rng.randint(17, 90), "fnlwgt": 1000 + n, "education_num": rng.randint(1, 16)}
        person |= {"capital_gain": rng.choice([0, 500, 99999]), "capital_loss": rng.choice([0, 20, 1902])}
        person |= {"hours_per_week": rng.randint(1, 99), "income": rng.choice(["<=50K", ">50K"])}
        people.append({name: person[name] for name in COLUMNS.split()})
    return people


def format_lines(people, end=""):
    return [", ".join(map(str, person.values())) + end for person in people]


def write(folder, data, test):
    """Write UCI's layout: an empty last line in adult.data, a remark and full stops in adult.test."""
    (folder / "adult.data").write_text("\n".join(data) + "\n\n")
    (folder / "adult.test").write_text("\n".join(["|1x3 Cross validator", *test]))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Return the folder, the rows of each split, the people of adult.data and the people of adult.test."""
    folder = tmp_path_factory.mktemp("adult")
    data, test = make_people(50, 1), make_people(20, 2, native_country=["Cuba", "Peru"])
    write(folder, format_lines(data), format_lines(test, "."))
    return folder, prepare("adult", folder / "out", "--source", folder, "--dim", 4), data, test


def test_splits_contain_each_person_once(prepared):
    _, rows, data, test = prepared
    train, valid, held_out = ([row["fnlwgt"] for row in of_split] for of_split in rows.values())
    assert len(train) == 40 and len(valid) == 10
    assert sorted(train + valid) == [person["fnlwgt"] for person in data] and train != sorted(train)
    assert held_out == [person["fnlwgt"] for person in test]


def test_labels_and_inputs_match_the_source_lines(prepared):
    _, rows, data, test = prepared
    by_number = {person["fnlwgt"]: person for person in data}
    train = [by_number[row["fnlwgt"]] for row in rows["train"]]

    def number(person, name):
        return math.log1p(person[name]) if name.startswith("capital") else person[name]

    for split, people in {"train": train, "test": test}.items():
        for row, person in zip(rows[split], people, strict=True):
            assert row["income"] == (person["income"] == ">50K")
            assert row["never_married"] == (person["marital_status"] == "Never-married")
            for name in ("age", "education_num", "capital_gain", "capital_loss", "hours_per_week"):
                known = [number(other, name) for other in train]
                expected = (number(person, name) - statistics.mean(known)) / statistics.pstdev(known)
                assert row[name] == pytest.approx(expected, abs=1e-5)
            for name in ("workclass", "education", "occupation", "race", "sex", "native_country"):
                values = sorted({other[name] for other in train} - {"?"})
                known = person[name] in values
                assert row[name] == (values.index(person[name]) + 1 if known else 0)
    assert {"Peru"} <= {person["native_country"] for person in test}  # not in train


def test_schema_omits_marital_status_and_its_proxies(prepared):
    schema = Schema.load(prepared[0] / "out/schema.yaml")
    assert schema.labels == ["income", "never_married"]
    inputs = {*schema.dense, *schema.sparse}
    assert inputs == {*COLUMNS.split()} - {"marital_status", "relationship", "fnlwgt", "income"}
    assert {table.rows for table in schema.tables.values()} == {3}  # two values each, and 0
    assert {table.dim for table in schema.tables.values()} == {4}


def test_seed_changes_the_validation_split(prepared, tmp_path):
    folder, rows, *_ = prepared
    other = prepare("adult", tmp_path / "out", "--source", folder, "--seed", 1)
    assert other["valid"] != rows["valid"] and len(other["valid"]) == 10


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("age", "old", "age is 'old', not an integer"),
        ("capital_gain", "-3", "capital_gain is '-3', not an integer"),
        ("fnlwgt", "9" * 30, "fnlwgt is '999"),
        ("occupation", "", "occupation is empty"),
        ("income", "50K", "income is '50K'"),
        ("income", None, "the line has 14 fields"),
        ("sex", "Male, Female", "the line has 16 fields"),
    ],
)
def test_malformed_adult_line_is_named(tmp_path, column, value, message):
    people = make_people(10, 3)
    if value is None:
        people[6].pop(column)
    else:
        people[6][column] = value
    write(tmp_path, format_lines(people), format_lines(make_people(5, 4)))
    text = get_recipe_error(DataError, "adult", tmp_path / "out", "--source", tmp_path)
    assert message in text and "adult.data, line 7" in text


def test_missing_and_empty_adult_files_are_rejected(tmp_path):
    arguments = (DataError, "adult", tmp_path / "out", "--source", tmp_path)
    assert "cannot read adult.data" in get_recipe_error(*arguments)
    write(tmp_path, format_lines(make_people(5, 5)), [])
    text = get_recipe_error(*arguments)
    assert "no rows" in text and "adult.test" in text
