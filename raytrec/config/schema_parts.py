"""Parts of a schema: tables, managed ids, sparse features, scales and statistics. No torch here."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from raytrec.config.base import Number, PositiveFloat, PositiveInt

Eviction = Literal["lru", "lfu", "none"]
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


class SchemaPart(BaseModel):
    """A part of a schema; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid")


class ManagedIds(SchemaPart):
    """Which ids get a row of a table, and which lose theirs when all are taken."""

    admit_after: PositiveInt = 1
    """An id gets a row at the step in which it has been seen so often, that step included."""
    eviction: Eviction = "lru"
    """Which ids lose their rows when all are taken: those not seen for longest (lru), those seen least often
    (lfu), or none: then later ids get no row. With lfu, at most a 64th of the rows changes hands at a
    step."""
    ttl_steps: PositiveInt | None = None
    """An id that was not seen for more steps than this loses its row, at the latest after an eighth more."""
    fallback_rows: PositiveInt = 1
    """How many of the table's rows, its last ones, are for ids without their own row; a hash of the id
    chooses among them."""


def _from_word(value: Any) -> Any:
    words: dict[str, dict | None] = {"static": None, "managed": {}}
    if isinstance(value, str) and value not in words:
        raise ValueError(f"expected static, managed, or some of {', '.join(ManagedIds.model_fields)}")
    return words[value] if isinstance(value, str) else value


# `static`, `managed`, or the keys of ManagedIds that are not as by default.
Ids = Annotated[ManagedIds | None, BeforeValidator(_from_word)]


class Table(SchemaPart):
    """An embedding table of `rows` × `dim` float32 values."""

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


class Sparse(SchemaPart):
    """A sparse feature: a bag (or sequence) of ids per row, looked up in one table."""

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


class Scale(SchemaPart):
    """What a number x of a dense column is read as: (x − mean) ÷ std."""

    mean: Number = 0.0
    """Is subtracted."""
    std: PositiveFloat = 1.0
    """The difference is divided by it."""
    log: bool = False
    """sign(x) · ln(1 + |x|) takes the place of x; mean and std are of it."""
    nulls: Literal["error", "mean"] = "error"
    """mean: nulls and NaN are read as the mean."""


class Statistics(SchemaPart):
    """What the ids of a sparse feature are like; a bag without ids counts."""

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
