"""The `model` section: one kind for each model, so that a key which a model does not read is refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator

from raytrec.common.python_path import PYTHON_PATH
from raytrec.config.base import Few, Number, Section

Size = Annotated[int, Field(strict=True, gt=0, le=2**20)]
Sizes = Annotated[list[Size], Field(max_length=1000)]
Dropout = Annotated[Number, Field(ge=0, lt=1)]


class DlrmSection(Section):
    """Dot products of all pairs of embeddings (models/dlrm.py)."""

    name: Literal["dlrm"] = Field("dlrm", description="The model.")
    bottom_mlp: Sizes = Field(
        [128], description="Hidden sizes between the dense columns and their embedding."
    )
    top_mlp: Sizes = Field([128, 64], description="Hidden sizes between interactions and logit.")
    dropout: Dropout = Field(0.0, description="Dropout in the top MLP while training.")


class DcnSection(Section):
    """Cross layers over all embeddings side by side: DCN-V2 (models/dcn.py)."""

    name: Literal["dcn"] = Field("dcn", description="The model.")
    bottom_mlp: Sizes = Field(
        [], description="Sizes of layers over the dense columns; []: the columns enter as they are."
    )
    cross_layers: Annotated[Few, Field(le=1000)] = Field(3, description="Cross layers, one after the other.")
    cross_rank: Size | None = Field(
        None, description="Rank of each cross layer's matrix, as a product U V; default: one full matrix."
    )
    deep: Literal["stacked", "parallel"] = Field(
        "stacked", description="top_mlp reads what the cross layers give, or their input beside them."
    )
    top_mlp: Sizes = Field([128, 64], description="Hidden sizes of the deep layers.")
    dropout: Dropout = Field(0.0, description="Dropout in the top MLP while training.")


class Towers(Section):
    query: list[str] = Field(
        min_length=1, description="Sparse features and dense columns (or patterns) of who or what asks."
    )
    item: list[str] = Field(min_length=1, description="Those of what is recommended.")


class TwoTowerSection(Section):
    """One vector for the query, one for the item, and their dot product (models/two_tower.py)."""

    name: Literal["two_tower"] = Field(description="The model.")
    towers: Towers = Field(
        description="Which features belong to which tower: each to one. Patterns as 'user*'."
    )
    tower_mlp: Annotated[Sizes, Field(min_length=1)] = Field(
        [128, 64], description="Sizes of each tower's layers; the last is the width of its vectors."
    )
    normalize: bool = Field(
        False, description="Vectors of length 1: retrieval by cosine instead of by dot product."
    )
    dropout: Dropout = Field(0.0, description="Dropout after each tower's hidden layers while training.")


class SequenceSection(Section):
    """Attention over sequences, for the item in question, before DLRM's dot products (models/sequence.py)."""

    name: Literal["sequence"] = Field(description="The model.")
    max_length: Few = Field(
        50,
        description="The most recent so many ids of a sequence feature are read; the last id is the newest.",
    )
    target: str | None = Field(
        None,
        description="The feature that sequences are attended for; default: the one that shares their table.",
    )
    attention_mlp: Sizes = Field(
        [32], description="Hidden sizes between an id beside the target and its score."
    )
    bottom_mlp: Sizes = Field(
        [128], description="Hidden sizes between the dense columns and their embedding."
    )
    top_mlp: Sizes = Field([128, 64], description="Hidden sizes between interactions and logit.")
    dropout: Dropout = Field(0.0, description="Dropout in the top MLP while training.")


class PythonSection(Section):
    """A class of yours, built from (Schema, this section); its contract: raytrec/models/__init__.py."""

    name: str = Field(description="module:Class, on Python's path or in the folder of the command.")
    options: dict[str, Any] = Field(default_factory=dict, description="Whatever the class reads from it.")
    max_length: Few | None = Field(
        None,
        description="The most recent so many ids of a sequence feature are given to the model, one by one; "
        "default: their mean.",
    )

    @field_validator("name")
    @classmethod
    def _path(cls, value: str) -> str:
        if not PYTHON_PATH.fullmatch(value):
            raise ValueError("a class is named as module:Class")
        return value


SECTIONS: dict[str, type[Section]] = {
    "dlrm": DlrmSection,
    "dcn": DcnSection,
    "two_tower": TwoTowerSection,
    "sequence": SequenceSection,
    "module:Class": PythonSection,
}


def _kind(value: Any) -> str | None:
    name = value.get("name", "dlrm") if isinstance(value, dict) else getattr(value, "name", None)
    if isinstance(name, str) and name in SECTIONS and name != "module:Class":
        return name
    return "module:Class" if PYTHON_PATH.fullmatch(str(name)) else None


ModelSection = Annotated[
    Annotated[DlrmSection, Tag("dlrm")]
    | Annotated[DcnSection, Tag("dcn")]
    | Annotated[TwoTowerSection, Tag("two_tower")]
    | Annotated[SequenceSection, Tag("sequence")]
    | Annotated[PythonSection, Tag("module:Class")],
    Discriminator(
        _kind,
        custom_error_type="model",
        custom_error_message="name is one of dlrm, dcn, two_tower, sequence, or module:Class",
    ),
]
