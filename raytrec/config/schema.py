"""schema.yaml: labels, dense columns, sparse features and tables.

Example of a `schema.yaml` next to the data:

    labels: [label]                    # numbers; in [0, 1] where probabilities are learned
    dense: [price, age]                # numbers
    scale:                             # normalization of dense columns
      price: {mean: 2.1, std: 0.8, log: true}
    sparse:                            # feature: how it is looked up
      user_id: {table: user}
      genres:  {table: genre, pooling: mean}
      history: {table: item, pooling: sequence}
      tags:    {table: tag, weights: tag_weights, column: tag_ids}
      film_id: {table: film}
    tables:
      user:  {rows: 944, dim: 16}
      genre: {rows: 19, dim: 16}
      item:  {rows: 1683, dim: 16, out_of_range: clamp}
      tag:   {rows: 5000, dim: 16, out_of_range: hash}
      film:  {rows: 100000, dim: 16, ids: managed}

A row may be a request with several candidates, each of which is an example. `candidates` names the labels,
dense columns and features that are lists with one value per candidate; all others belong to the request.

    candidates: [label, price, film_id]

`raytrec inspect` adds `scale`, which normalizes dense columns, and `statistics` of the sparse features. Plans
estimate lookups from the statistics; the trained model does not depend on them.

Torch is not imported: the driver reads schemas on machines without torch.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from raytrec.common.errors import SchemaError, format_suggestion, join_first_lines, shorten_repr
from raytrec.common.reading import UnreadableError, parse_yaml
from raytrec.config.base import read_settings, reword_message
from raytrec.config.schema_parts import ManagedIds, Scale, SchemaPart, Sparse, Statistics, Table, to_table_name


class Schema(SchemaPart):
    """Columns of a dataset and the embedding tables that its sparse features look up."""

    labels: list[str] = Field(min_length=1)
    """Columns to predict: numbers in the range of their task's loss (bce: 0 to 1)."""
    dense: list[str] = Field(default_factory=list)
    """Columns of numbers."""
    scale: dict[str, Scale] = Field(default_factory=dict)
    """Dense column → its scaling; default: numbers are not scaled."""
    sparse: dict[str, Sparse] = Field(min_length=1)
    """Feature name → its table, pooling and columns."""
    tables: dict[str, Table] = Field(min_length=1)
    """Table name → its size and treatment of ids."""
    statistics: dict[str, Statistics] = Field(default_factory=dict)
    """Sparse feature → statistics of its ids."""
    candidates: list[str] = Field(default_factory=list)
    """Labels, dense columns and sparse features that are lists with one value per candidate of the row's
    request, all of the same length. Default: a row is one example."""

    @model_validator(mode="after")
    def _check_consistency(self) -> Schema:
        for name, feature in self.sparse.items():
            if feature.table not in self.tables:
                near = format_suggestion(feature.table, self.tables) or f" (tables: {', '.join(self.tables)})"
                raise ValueError(f"sparse.{name}.table: there is no table '{feature.table}'{near}")
            if feature.side_features and feature.pooling != "sequence":
                raise ValueError(f"sparse.{name}.side_features: side features require pooling: sequence")
        if unknown := sorted(set(self.statistics) - set(self.sparse)):
            raise ValueError(
                f"statistics: there is no sparse feature '{unknown[0]}'{format_suggestion(unknown[0], self.sparse)}"
            )
        if unknown := sorted(set(self.scale) - set(self.dense)):
            raise ValueError(
                f"scale: there is no dense column '{unknown[0]}'{format_suggestion(unknown[0], self.dense)}"
            )
        self._check_candidates()
        for name in self.tables:
            if name != to_table_name(name) or not name:
                fault = "contains a dot" if "." in name else "is an attribute of torch's modules"
                advice = f"tables.{name}: the name {fault}; use '{to_table_name(name)}'"
                raise ValueError(advice if name else "tables: the name of a table is empty")
        if unused := set(self.tables) - {f.table for f in self.sparse.values()}:
            raise ValueError(f"tables: no sparse feature looks up {', '.join(sorted(unused))}")
        single = [*self.labels, *self.dense]
        if duplicates := {c for c in single if single.count(c) > 1}:
            raise ValueError(f"labels, dense: column '{min(duplicates)}' is listed twice")
        if leaked := set(self.labels) & set(self._list_sparse_columns()):
            raise ValueError(f"sparse: column '{min(leaked)}' is a label and also an input")
        return self

    def _check_candidates(self) -> None:
        names = [*self.labels, *self.dense, *self.sparse]
        for name in self.candidates:
            if name not in names:
                raise ValueError(
                    f"candidates: there is no label, dense column or sparse feature '{name}'"
                    + format_suggestion(name, names)
                )
            spec = self.sparse.get(name)
            if spec and (spec.weights is not None or spec.pooling == "sequence"):
                fault = "is a sequence" if spec.pooling == "sequence" else "has weights"
                raise ValueError(f"candidates: {name} {fault}, but a candidate has one id per feature")
        if self.candidates and not self.select_candidate_names(self.sparse):
            raise ValueError("candidates: at least one sparse feature is required, to count each row's candidates")

    def select_candidate_names(self, names: Collection[str]) -> list[str]:
        """Return the names that belong to candidates, in the given order.

        Args:
            names: Names of labels, dense columns or features.
        """
        return [name for name in names if name in self.candidates]

    def select_request_names(self, names: Collection[str]) -> list[str]:
        """Return the names that belong to requests instead of candidates, in the given order.

        Args:
            names: Names of labels, dense columns or features.
        """
        return [name for name in names if name not in self.candidates]

    @property
    def features_by_table(self) -> dict[str, list[str]]:
        """Return a mapping from each table to the sparse features that look it up."""
        features: dict[str, list[str]] = {table: [] for table in self.tables}
        for feature, spec in self.sparse.items():
            features[spec.table].append(feature)
        return features

    def get_ids_column(self, feature: str) -> str:
        """Return the column that holds a sparse feature's ids."""
        return self.sparse[feature].column or feature

    def get_feature_dim(self, feature: str) -> int:
        """Return the width of the vectors that a sparse feature looks up."""
        return self.tables[self.sparse[feature].table].dim

    @property
    def columns(self) -> list[str]:
        """Return every column that the schema uses, each once: labels, dense columns, columns of sparse features."""
        return list(dict.fromkeys([*self.labels, *self.dense, *self._list_sparse_columns()]))

    def _list_sparse_columns(self) -> list[str]:
        names = []
        for feature, spec in self.sparse.items():
            weights = [] if spec.weights is None else [spec.weights]
            names += [self.get_ids_column(feature), *weights, *spec.side_features]
        return names

    @property
    def inputs(self) -> list[str]:
        """Return every column that the schema uses except labels, each once."""
        return [name for name in self.columns if name not in self.labels]

    def select_features(self, names: Collection[str]) -> Schema:
        """Return a copy with only these dense columns and sparse features. All labels and tables are kept."""
        dense = [name for name in self.dense if name in names]
        parts: dict[str, Mapping] = {"sparse": self.sparse, "scale": self.scale, "statistics": self.statistics}
        update = {key: {name: of for name, of in part.items() if name in names} for key, part in parts.items()}
        candidates = [name for name in self.candidates if name in (*self.labels, *names)]
        return self.model_copy(update={"dense": dense, "candidates": candidates} | update)

    @property
    def managed(self) -> list[str]:
        """Return the tables whose ids are managed."""
        return [name for name, table in self.tables.items() if table.ids]

    @property
    def has_weights(self) -> bool:
        """Return True if any sparse feature has per-id weights."""
        return any(f.weights for f in self.sparse.values())

    @classmethod
    def parse(cls, values: object, where: str, do: str = "correct these keys") -> Schema:
        """Build a schema from plain values; errors name their source `where` and the advice `do`.

        Raises:
            SchemaError: The values are not a valid schema. One message lists up to 20 problems, with the nearest
                valid key for an unknown key.
        """
        if not isinstance(values, dict):
            raise SchemaError(
                "the schema is not a mapping of keys", where=where, expected="labels, dense, sparse and tables", do=do
            )
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise SchemaError(
                join_first_lines([_explain(dict(e)) for e in error.errors()[:20]], error.error_count()),
                where=where,
                expected="labels, dense, sparse: {feature: {table, pooling}}, tables: {table: {rows, dim}}",
                do=do,
            ) from None

    @classmethod
    def parse_stored(cls, text: str, where: str) -> Schema:
        """Parse a schema that a run or a checkpoint has stored as text; `where` names the source in errors.

        Raises:
            SchemaError: The text is not YAML, or not a valid schema (see `parse`).
        """
        try:
            values = parse_yaml(text)
        except UnreadableError as error:
            raise SchemaError(f"cannot parse the YAML: {error}", where=where) from None
        return cls.parse(values, where, "restore the file from a backup, or use another checkpoint")

    @classmethod
    def load(cls, path: str | Path) -> Schema:
        """Read a schema.yaml.

        Args:
            path: Local path, or any URI that pyarrow's filesystems read.

        Raises:
            SchemaError: The file does not exist, cannot be read, or is not a valid schema (see `parse`).
            DataError: The URI is invalid, or its store cannot be reached.
        """
        missing = SchemaError(
            "the schema file does not exist",
            where=str(path),
            expected="a schema.yaml next to the data, or data.schema=PATH",
            do="create a schema with `raytrec inspect DIR > schema.yaml`",
        )
        do = "correct the file, or print a schema of the data with `raytrec inspect DIR`"
        return cls.parse(read_settings(str(path), "schema", missing), str(path), do)

    def to_yaml(self, comments: Mapping[tuple[str, str], str] | None = None) -> str:
        """Return the text of a schema.yaml: one line per feature and table, without keys that have default values.

        Args:
            comments: (section, name) → one-line comment on a label, dense column, feature or table.
        """
        comments, lines = comments or {}, []
        for section in ("labels", "dense"):
            names = getattr(self, section)
            pairs = ((name, comments.get((section, name))) for name in names)
            lines += [f"# {format_yaml_scalar(name)}: {comment}" for name, comment in pairs if comment]
            lines.append(f"{section}: [{', '.join(map(format_yaml_scalar, names))}]")
        for section in ("scale", "sparse", "tables"):
            lines += [f"{section}:"] if getattr(self, section) else []
            for name, spec in getattr(self, section).items():
                values = spec.model_dump(exclude_defaults=True)
                values |= {"ids": "managed"} if values.get("ids") == {} else {}
                inner = ", ".join(f"{key}: {format_yaml_scalar(value)}" for key, value in values.items())
                comment = comments.get((section, name))
                lines.append(f"  {format_yaml_scalar(name)}: {{{inner}}}" + (f"  # {comment}" if comment else ""))
        for name, statistics in self.statistics.items():
            lines += ["statistics:"] if "statistics:" not in lines else []
            lines.append(f"  {format_yaml_scalar(name)}: {json.dumps(statistics.model_dump())}")
        if self.candidates:
            lines.append(f"candidates: [{', '.join(map(format_yaml_scalar, self.candidates))}]")
        return "\n".join(lines) + "\n"


def format_yaml_scalar(value: object) -> str:
    """Return a value as YAML flow text on one line, with quotes if necessary; raise YAMLError for other objects."""
    odd = isinstance(value, str) and not value.isprintable()  # needs escapes to stay on one line
    style = {"default_style": '"'} if odd else {"allow_unicode": True}
    flow = yaml.safe_dump([value], default_flow_style=True, width=10**6, sort_keys=False, **style)
    return flow.strip()[1:-1]


def format_transform(do: str, column: str, **settings: object) -> str:
    """Return an entry of data.transforms as YAML flow text; settings are written without quotes."""
    parts = {"do": do, "columns": f"[{format_yaml_scalar(column)}]", **settings}
    return f"{{{', '.join(f'{key}: {value}' for key, value in parts.items())}}}"


def advise_transform(do: str, column: str, **settings: object) -> str:
    """Return the advice to add a transform to the configuration."""
    return f"add to data.transforms: {format_transform(do, column, **settings)}"


def _explain(error: dict) -> str:
    place = ".".join(str(p) for p in error["loc"])
    if error["type"] == "extra_forbidden":
        parts: dict[object, type[BaseModel]] = {"sparse": Sparse, "scale": Scale, "statistics": Statistics}
        of_part = parts.get(error["loc"][0], Table)
        known = dict[int, type[BaseModel]]({0: Schema, 2: of_part, 3: ManagedIds}).get(len(error["loc"]) - 1)
        return f"{place}: unknown key" + format_suggestion(str(error["loc"][-1]), known.model_fields if known else ())
    if error["type"] == "missing":
        return f"{place}: missing"
    message = reword_message(error["msg"].removeprefix("Value error, "))
    if error["type"] == "value_error" and not place:
        return message
    received = "" if isinstance(error["input"], dict) else f" (got {shorten_repr(error['input'])})"
    return f"{place}: {message}{received}"
