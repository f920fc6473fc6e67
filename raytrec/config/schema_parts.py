"""Parts of a schema: tables, managed ids, sparse features, scales and statistics. Does not import torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from raytrec.config.base import Number, PositiveFloat, PositiveInt

Eviction = Literal["lru", "lfu", "none"]
# Tables are entries of a torch.nn.ModuleDict, which rejects the names of its attributes as keys.
RESERVED_TABLE_NAMES = frozenset(
    """T_destination add_module apply bfloat16 buffers call_super_init children clear compile cpu cuda double
    dump_patches eval extra_repr float forward get_buffer get_extra_state get_parameter get_submodule half ipu
    items keys load_state_dict modules mtia named_buffers named_children named_modules named_parameters
    parameters pop register_backward_hook register_buffer register_forward_hook register_forward_pre_hook
    register_full_backward_hook register_full_backward_pre_hook register_load_state_dict_post_hook
    register_load_state_dict_pre_hook register_module register_parameter register_state_dict_post_hook
    register_state_dict_pre_hook requires_grad_ set_extra_state set_submodule share_memory state_dict to
    to_empty train training type update values xpu zero_grad""".split()  # noqa: SIM905
)


def to_table_name(text: str) -> str:
    """Return a valid table name derived from a text, which must not be empty."""
    name = text.replace(".", "_")
    return f"{name}_table" if name in RESERVED_TABLE_NAMES else name


class SchemaPart(BaseModel):
    """Base class of a schema and its parts. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid")


class ManagedIds(SchemaPart):
    """Rules by which an id gets a row of a table, and loses it when all rows are taken or the id expires."""

    admit_after: PositiveInt = 1
    """Number of occurrences after which an id gets a row; the row is assigned in the step that reaches this number."""
    eviction: Eviction = "lru"
    """Ids that lose their rows when all rows are taken: the least recently seen (lru), the least frequently
    seen (lfu), or none. With none, later ids get no row. With lfu, at most 1/64 of the rows (at least one) are
    reassigned in one step."""
    ttl_steps: PositiveInt | None = None
    """Number of steps without an occurrence after which an id loses its row. Expired ids are searched for every
    ttl_steps ÷ 8 steps; default: ids do not expire."""
    fallback_rows: PositiveInt = 1
    """Number of rows at the end of the table that ids without a dedicated row share. A hash of the id
    selects the row."""


def _parse_managed_ids(value: Any) -> Any:
    value = {"static": None, "managed": {}}.get(value, value) if isinstance(value, str) else value
    if not isinstance(value, dict | ManagedIds | None):
        raise ValueError(f"expected static, managed, or a mapping of {', '.join(ManagedIds.model_fields)}")
    return value


# `static`, `managed`, or a mapping of the keys of ManagedIds that differ from their defaults.
Ids = Annotated[ManagedIds | None, BeforeValidator(_parse_managed_ids)]


class Table(SchemaPart):
    """An embedding table of `rows` × `dim` values, float32 unless plan.tables sets dtype: fp16."""

    rows: PositiveInt
    """Number of rows. Valid ids are 0 to rows - 1 unless ids are managed."""
    dim: PositiveInt = Field(multiple_of=4, le=2**16)
    """Width of the embeddings; a multiple of 4 (FBGEMM)."""
    out_of_range: Literal["error", "clamp", "hash"] = "error"
    """Treatment of ids < 0 or ≥ rows: raise an error, clamp to the nearest valid id, or hash into [0, rows).
    Text ids need 'hash'. Valid ids are never changed."""
    ids: Ids = None
    """static: an id is its row number. managed, or a mapping of the keys of managed ids: ids are any integers
    or text, and rows are assigned as ids occur."""

    @model_validator(mode="after")
    def _check_ids(self) -> Table:
        if self.ids and self.out_of_range != "error":
            raise ValueError("out_of_range is set, but managed ids are never out of range")
        if self.ids and self.rows <= self.ids.fallback_rows:
            raise ValueError(f"rows: expected more than ids.fallback_rows={self.ids.fallback_rows} (got {self.rows})")
        return self

    @property
    def takes_text(self) -> bool:
        """Return True if ids may be text."""
        return self.ids is not None or self.out_of_range == "hash"

    @property
    def own_rows(self) -> int:
        """Return the number of ids that can have a dedicated row: all rows except the fallback rows of managed ids."""
        return self.rows - self.ids.fallback_rows if self.ids else self.rows


class Sparse(SchemaPart):
    """A sparse feature: a bag or sequence of ids per row, looked up in one table."""

    table: str
    """Table in which the ids are looked up. Features may share a table."""
    pooling: Literal["sum", "mean", "sequence"] = "sum"
    """Reduction of a bag to one vector: sum or mean (an empty bag is 0). sequence: ids in the order of time, the most
    recent id last. Models that read sequences receive up to model.max_length ids; other models read the mean."""
    weights: str | None = None
    """List column with one float per id; default: all weights are 1."""
    column: str | None = None
    """Column of the ids; default: the name of the feature."""
    side_features: list[str] = Field(default_factory=list)
    """List columns with one number or time per id of a sequence, for models that read the sequence id by id.
    Times become seconds since 1970."""


class Scale(SchemaPart):
    """Scaling of a dense column: a number x is read as (x − mean) ÷ std."""

    mean: Number = 0.0
    """Number that is subtracted."""
    std: PositiveFloat = 1.0
    """Number by which the difference is divided."""
    log: bool = False
    """Replace x by sign(x) · ln(1 + |x|) first; mean and std then describe the transformed values."""
    nulls: Literal["error", "mean"] = "error"
    """error: nulls are rejected. mean: nulls and NaN are read as the mean."""


class Statistics(SchemaPart):
    """Statistics of a sparse feature's ids. Empty bags are included."""

    mean_length: float = Field(ge=0)
    """Mean number of ids per row."""
    p99_length: int = Field(ge=0)
    """99th percentile of the number of ids per row."""
    max_length: int = Field(ge=0)
    """Number of ids in the longest bag."""
    distinct: int = Field(ge=0)
    """Number of distinct ids."""
    hottest: list[float] = Field(default_factory=list)
    """Shares of all lookups that go to the 1, 10, 100, … most frequent ids."""
