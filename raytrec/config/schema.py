"""schema.yaml: labels, dense columns, sparse features and tables.

A `schema.yaml` next to the data:

    labels: [label]                    # numbers; in [0, 1] where probabilities are learned
    dense: [price, age]                # numbers
    scale:                             # what they are read as
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

A row may be a request with several candidates, each of them an example: `candidates` names the labels, dense
columns and features that are lists of one value for each; the others belong to the request.

    candidates: [label, price, film_id]

`raytrec inspect` adds `scale`, by which dense columns are brought to one size, and `statistics` of the sparse
features, by which plans count lookups; nothing that is trained depends on these.

No torch here: the driver reads schemas on machines without it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from raytrec.common.errors import SchemaError, hint, some, some_of
from raytrec.common.reading import NotReadable, yaml_values
from raytrec.config.base import Number, PositiveFloat, PositiveInt
from raytrec.config.managed import Ids, ManagedIds

# Tables are entries of a torch.nn.ModuleDict, which cannot have its own attributes' names as keys.
RESERVED = frozenset(
    """T_destination add_module apply bfloat16 buffers call_super_init children clear compile cpu cuda double
    dump_patches eval extra_repr float forward get_buffer get_extra_state get_parameter get_submodule half ipu
    items keys load_state_dict modules mtia named_buffers named_children named_modules named_parameters
    parameters pop register_backward_hook register_buffer register_forward_hook register_forward_pre_hook
    register_full_backward_hook register_full_backward_pre_hook register_load_state_dict_post_hook
    register_load_state_dict_pre_hook register_module register_parameter register_state_dict_post_hook
    register_state_dict_pre_hook requires_grad_ set_extra_state set_submodule share_memory state_dict to
    to_empty train training type update values xpu zero_grad""".split()  # noqa: SIM905
)


def table_name(text: str) -> str:
    """The name nearest to a text that a table can have."""
    name = text.replace(".", "_")
    return f"{name}_table" if name in RESERVED else name


class Table(BaseModel):
    """An embedding table of `rows` × `dim` float32 values."""

    model_config = ConfigDict(extra="forbid")
    rows: PositiveInt
    """Number of ids; valid ids are 0 to rows - 1."""
    dim: PositiveInt = Field(multiple_of=4, le=2**16)
    """Width of one embedding; a multiple of 4 (FBGEMM)."""
    out_of_range: Literal["error", "clamp", "hash"] = "error"
    """What an id < 0 or ≥ rows becomes: an error, the nearest valid id, or a hash of it into [0, rows). Text
    ids need 'hash'. Valid ids are never changed."""
    ids: Ids = None
    """static: an id is the number of its row. managed, or how: ids are any integers or text and get rows as
    they come."""

    @model_validator(mode="after")
    def _fits_ids(self) -> Table:
        if self.ids and self.out_of_range != "error":
            raise ValueError("out_of_range has no meaning where ids are managed: none is out of range")
        if self.ids and self.rows <= self.ids.fallback_rows:
            raise ValueError(f"rows: more than ids.fallback_rows={self.ids.fallback_rows} are needed")
        return self

    @property
    def takes_text(self) -> bool:
        """Whether ids may be text."""
        return self.ids is not None or self.out_of_range == "hash"

    @property
    def own_rows(self) -> int:
        """How many ids can have their own row."""
        return self.rows - self.ids.fallback_rows if self.ids else self.rows


class Sparse(BaseModel):
    """A sparse feature: a bag (or sequence) of ids per row, looked up in one table."""

    model_config = ConfigDict(extra="forbid")
    table: str
    """The table that the ids look up; features may share one."""
    pooling: Literal["sum", "mean", "sequence"] = "sum"
    """How a bag becomes one vector: sum, mean (an empty bag is 0), or left as a sequence for models that read
    sequences, the most recent id last (others take its mean)."""
    weights: str | None = None
    """List column with one float per id; default: all 1."""
    column: str | None = None
    """The Parquet column; default: the feature's name."""
    side_features: list[str] = Field(default_factory=list)
    """List columns with one number or time per id of a sequence, for models that read it id by id. Times
    become seconds since 1970."""


class Scale(BaseModel):
    """What a number x of a dense column is read as: (x − mean) ÷ std."""

    model_config = ConfigDict(extra="forbid")
    mean: Number = 0.0
    """Is subtracted."""
    std: PositiveFloat = 1.0
    """The difference is divided by it."""
    log: bool = False
    """sign(x) · ln(1 + |x|) takes the place of x; mean and std are of it."""
    nulls: Literal["error", "mean"] = "error"
    """mean: nulls and NaN are read as the mean."""


class Statistics(BaseModel):
    """What the ids of a sparse feature are like; a bag without ids counts."""

    model_config = ConfigDict(extra="forbid")
    mean_length: float = Field(ge=0)
    """Ids of a row, on average."""
    p99_length: int = Field(ge=0)
    """Ids that 99 of 100 rows have at most."""
    max_length: int = Field(ge=0)
    """Ids of the longest bag."""
    distinct: int = Field(ge=0)
    """Distinct ids."""
    hottest: list[float] = Field(default_factory=list)
    """Shares of all lookups of the 1, 10, 100, … ids that are looked up most."""


class Schema(BaseModel):
    """The columns of a dataset and the embedding tables behind them."""

    model_config = ConfigDict(extra="forbid")
    labels: list[str] = Field(min_length=1)
    """Columns to predict; numbers that their task's loss takes (bce: 0 to 1)."""
    dense: list[str] = Field(default_factory=list)
    """Columns of numbers."""
    scale: dict[str, Scale] = Field(default_factory=dict)
    """Dense column → what its numbers are read as; default: they are read as they are."""
    sparse: dict[str, Sparse] = Field(min_length=1)
    """Feature name → how it is looked up."""
    tables: dict[str, Table] = Field(min_length=1)
    """Table name → its size."""
    statistics: dict[str, Statistics] = Field(default_factory=dict)
    """Sparse feature → what its ids are like."""
    candidates: list[str] = Field(default_factory=list)
    """Labels, dense columns and sparse features that are lists: one value for each candidate of the row's
    request, and as many in all of them. Default: a row is one example."""

    @model_validator(mode="after")
    def _consistent(self) -> Schema:
        for name, feature in self.sparse.items():
            if feature.table not in self.tables:
                near = hint(feature.table, self.tables) or f"; tables are {', '.join(self.tables)}"
                raise ValueError(f"sparse.{name}.table: there is no table '{feature.table}'{near}")
            if feature.side_features and feature.pooling != "sequence":
                raise ValueError(
                    f"sparse.{name}.side_features: only a feature of pooling: sequence has side features"
                )
        if unknown := sorted(set(self.statistics) - set(self.sparse)):
            raise ValueError(f"statistics: there is no sparse feature {', '.join(unknown)}")
        if unknown := sorted(set(self.scale) - set(self.dense)):
            raise ValueError(f"scale: there is no dense column {', '.join(unknown)}")
        self._check_candidates()
        for name in self.tables:
            if name != table_name(name) or not name:
                raise ValueError(
                    f"tables.{name}: a table cannot have this name (empty, with a dot, or an attribute of "
                    "torch's modules)" + (f"; call it '{table_name(name)}'" if name else "")
                )
        unused = set(self.tables) - {f.table for f in self.sparse.values()}
        if unused:
            raise ValueError(f"tables: no sparse feature looks up {', '.join(sorted(unused))}")
        single = [*self.labels, *self.dense]
        twice = {c for c in single if single.count(c) > 1}
        if twice:
            raise ValueError(f"labels/dense: column {', '.join(sorted(twice))} is named twice")
        leaked = set(self.labels) & {c for f in self.sparse.values() for c in (f.column, f.weights) if c}
        leaked |= set(self.labels) & {n for n, f in self.sparse.items() if f.column is None}
        leaked |= set(self.labels) & {column for f in self.sparse.values() for column in f.side_features}
        if leaked:
            raise ValueError(f"sparse: label {', '.join(sorted(leaked))} is also an input")
        return self

    def _check_candidates(self) -> None:
        known = [*self.labels, *self.dense, *self.sparse]
        for name in self.candidates:
            if name not in known:
                raise ValueError(
                    f"candidates: there is no label, dense column or sparse feature '{name}'"
                    + hint(name, known)
                )
            spec = self.sparse.get(name)
            if spec and (spec.weights or spec.pooling == "sequence"):
                raise ValueError(
                    f"candidates: {name} has weights or is a sequence; a candidate has one id of a feature"
                )
        if self.candidates and not self.of_candidates(self.sparse):
            raise ValueError(
                "candidates: there is no sparse feature among them, by whose ids they are counted"
            )

    def of_candidates(self, names: Collection[str]) -> list[str]:
        """Those of some labels, dense columns or features that are of candidates, in their order."""
        return [name for name in names if name in self.candidates]

    def of_requests(self, names: Collection[str]) -> list[str]:
        """The others: those of a row."""
        return [name for name in names if name not in self.candidates]

    def column_of(self, feature: str) -> str:
        """The Parquet column that holds a sparse feature's ids."""
        return self.sparse[feature].column or feature

    def dim_of(self, feature: str) -> int:
        """Return the width of the vectors that a sparse feature looks up."""
        return self.tables[self.sparse[feature].table].dim

    @property
    def columns(self) -> list[str]:
        """Every Parquet column to read, each once, labels first."""
        names = [*self.labels, *self.dense]
        for feature, spec in self.sparse.items():
            names.append(self.column_of(feature))
            if spec.weights:
                names.append(spec.weights)
            names += spec.side_features
        return list(dict.fromkeys(names))

    @property
    def inputs(self) -> list[str]:
        """Every Parquet column of features, each once."""
        return [name for name in self.columns if name not in self.labels]

    def part(self, names: Collection[str]) -> Schema:
        """The same with no other dense columns and sparse features than these; all labels and tables stay."""
        dense = [name for name in self.dense if name in names]
        parts: dict[str, Mapping] = {
            "sparse": self.sparse,
            "scale": self.scale,
            "statistics": self.statistics,
        }
        kept = {key: {name: of for name, of in part.items() if name in names} for key, part in parts.items()}
        candidates = [name for name in self.candidates if name in (*self.labels, *names)]
        return self.model_copy(update={"dense": dense, "candidates": candidates} | kept)

    @property
    def managed(self) -> list[str]:
        """Tables whose ids are managed."""
        return [name for name, table in self.tables.items() if table.ids]

    @property
    def has_weights(self) -> bool:
        """True when any sparse feature carries per-id weights."""
        return any(f.weights for f in self.sparse.values())

    @classmethod
    def parse(cls, values: object, where: str) -> Schema:
        """A schema from plain values; `where` names their source in errors.

        Raises:
            SchemaError: with every problem found, and the nearest key for a misspelt one.
        """
        if not isinstance(values, dict):
            raise SchemaError(
                "the schema is not a mapping of keys",
                where=where,
                expected="labels, dense, sparse and tables",
                do="write one with `raytrec inspect DIR`",
            )
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise SchemaError(
                some_of([_explain(dict(e)) for e in error.errors()[:20]], error.error_count()),
                where=where,
                expected="labels, dense, sparse: {feature: {table, pooling}}, tables: {table: {rows, dim}}",
                do="correct the file; `raytrec inspect DIR` prints one that fits the data",
            ) from None

    @classmethod
    def stored(cls, text: str, where: str) -> Schema:
        """The schema that a run or a checkpoint has stored as text; `where` names it in errors.

        Raises:
            SchemaError: as in `parse`.
        """
        try:
            values = yaml_values(text)
        except NotReadable as error:
            raise SchemaError(f"not YAML that can be used: {error}", where=where) from None
        return cls.parse(values, where)

    @classmethod
    def load(cls, path: str | Path) -> Schema:
        """Reads a schema.yaml (local path or any URI that pyarrow's filesystems read)."""
        from raytrec.common.storage import read_yaml

        try:
            values = read_yaml(str(path))
        except (FileNotFoundError, NotADirectoryError):
            raise SchemaError(
                "there is no schema file",
                where=str(path),
                expected="a schema.yaml next to the data, or data.schema=PATH",
                do="write one with `raytrec inspect DIR > schema.yaml`",
            ) from None
        except NotReadable as error:
            raise SchemaError(f"not YAML that can be used: {error}", where=str(path)) from None
        except OSError as error:
            raise SchemaError(f"cannot read the schema: {error.strerror or error}", where=str(path)) from None
        return cls.parse(values, str(path))

    def to_yaml(self, comments: Mapping[tuple[str, str], str] | None = None) -> str:
        """The text of a schema.yaml: one line for each feature and table, without defaults.

        Args:
            comments: (section, name) → comment on a label, dense column, feature or table; one line.
        """
        comments, lines = comments or {}, []
        for section in ("labels", "dense"):
            names = getattr(self, section)
            known = ((name, comments.get((section, name))) for name in names)
            lines += [f"# {scalar(name)}: {comment}" for name, comment in known if comment]
            lines.append(f"{section}: [{', '.join(map(scalar, names))}]")
        for section in ("scale", "sparse", "tables"):
            lines += [f"{section}:"] if getattr(self, section) else []
            for name, spec in getattr(self, section).items():
                values = spec.model_dump(exclude_defaults=True)
                values |= {"ids": "managed"} if values.get("ids") == {} else {}
                inner = ", ".join(f"{key}: {scalar(value)}" for key, value in values.items())
                comment = comments.get((section, name))
                lines.append(f"  {scalar(name)}: {{{inner}}}" + (f"  # {comment}" if comment else ""))
        for name, found in self.statistics.items():
            lines += ["statistics:"] if "statistics:" not in lines else []
            lines.append(f"  {scalar(name)}: {json.dumps(found.model_dump())}")
        if self.candidates:
            lines.append(f"candidates: [{', '.join(map(scalar, self.candidates))}]")
        return "\n".join(lines) + "\n"


def scalar(value: object) -> str:
    """A scalar as YAML flow text, quoted where YAML needs it."""
    odd = isinstance(value, str) and not value.isprintable()  # escaped, on one line
    style = {"default_style": '"'} if odd else {"allow_unicode": True}
    flow = yaml.safe_dump([value], default_flow_style=True, width=10**6, sort_keys=False, **style)
    return flow.strip()[1:-1]


def _explain(error: dict) -> str:
    place = ".".join(str(p) for p in error["loc"])
    if error["type"] == "extra_forbidden":
        parts: dict[object, type[BaseModel]] = {"sparse": Sparse, "scale": Scale, "statistics": Statistics}
        of_part = parts.get(error["loc"][0], Table)
        known = dict[int, type[BaseModel]]({0: Schema, 2: of_part, 3: ManagedIds}).get(len(error["loc"]) - 1)
        return f"{place}: unknown key" + hint(str(error["loc"][-1]), known.model_fields if known else ())
    if error["type"] == "missing":
        return f"{place}: missing"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error" and not place:
        return message
    given = "" if isinstance(error["input"], dict) else f" (got {some(error['input'])})"
    return f"{place}: {message}{given}"
