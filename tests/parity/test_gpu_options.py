"""Every option with a fixed set of values is trained at least once on stand-in GPUs.

The stand-in refuses what CUDA refuses: tensors on two devices in one operator, and operators without a CUDA
kernel. The cases are generated from the configuration classes, so a new option or value is trained, too.
"""

from types import NoneType
from typing import Literal, get_args, get_origin
from unittest.mock import patch

import loop
import pytest
import torch.utils.checkpoint as checkpoint
from ranks import run_on_ranks
from small import make_small_schema
from test_models import ALL_CASES

from raytrec.common.errors import ConfigError
from raytrec.config.models.base import MODELS
from raytrec.config.schema import Schema
from raytrec.config.tables import DenseOptim, EmbeddingOptim, QCommsSection, Schedule, TablePlan
from raytrec.config.training import TrainSection
from raytrec.tasks.losses import loss

STEPS = 3
# (section, option): values that are not trained here, and why.
LEFT_OUT = {
    ("train", "epochs"): {"auto": "the driver resolves it"},
    ("train", "initial_bias"): {"log_odds": "the driver counts positives"},
    ("train", "eval_every_steps"): {"auto": "the driver resolves it", "next_folder": "the stream reports folders"},
    ("train", "compile"): {True: "inductor compiles no stand-in", "graphs": "inductor compiles no stand-in"},
    ("plan.tables.*", "compute_kernel"): {"fused_mmap": "it is for CPU workers"},
    ("two_tower", "share_negatives"): {True: "it requires negatives, which the case 'two_tower, shared' has"},
    ("ncf", "share_negatives"): {True: "ncf refuses it"},
}
# Options of these sections are set one at a time: section → (its class, changes that the option requires).
SECTIONS = {
    "train": (TrainSection, {"clip_tables": {"train.max_grad_norm": 0.5}}),
    "optim.dense": (DenseOptim, {}),
    "optim.schedule": (Schedule, {"decay": {"optim.schedule.warmup_steps": 2}}),
    "optim.embeddings": (EmbeddingOptim, {}),
    "plan.tables.*": (TablePlan, {}),
    "plan.qcomms": (QCommsSection, {}),
}
WIDE_SCHEMA = make_small_schema(tables={"user": {"rows": 23, "dim": 16}, "tag": {"rows": 5, "dim": 16}})
# Values that require other values of the default case.
REQUIRED = {
    ("optim.embeddings", "name", "adam"): {"kernel": "dense"},
    ("plan.tables.*", "sharding_type", "data_parallel"): {"kernel": "dense"},
    ("plan.tables.*", "compute_kernel", "dense"): {"optimizer": "adam"},
    ("plan.qcomms", "forward_precision", "int8"): {"plan": "table_wise", "schema": WIDE_SCHEMA},
    ("plan.qcomms", "backward_precision", "int8"): {"plan": "table_wise", "schema": WIDE_SCHEMA},
}
# Keys of a model's section that are removed for some values of an option.
REMOVED = {("final_mlp", "gating", False): ["gate1", "gate2"]}
LOSS_OPTIONS = {"cross_entropy": {"classes": 2}}
MODEL_LOSSES = ["from_model"]  # the cases of such models have it


def list_fixed_values(annotation):
    """Return the fixed values of a type: of a Literal its members, of bool both, of a union those of its parts."""
    if annotation is bool:
        return [False, True]
    if get_origin(annotation) is Literal:
        return [value for value in get_args(annotation) if value is not None]
    return [value for part in get_args(annotation) if part is not NoneType for value in list_fixed_values(part)]


def list_options(section):
    """Return {option: its fixed values} of a section of the configuration."""
    options = {name: list_fixed_values(field.annotation) for name, field in section.model_fields.items()}
    return {name: values for name, values in options.items() if values}


def list_section_cases():
    """Return {name: (changes, other arguments of make_worker_loop)} for SECTIONS."""
    cases = {}
    for key, (section, required) in SECTIONS.items():
        for option, values in list_options(section).items():
            for value in values:
                if value in LEFT_OUT.get((key, option), {}):
                    continue
                arguments = dict(REQUIRED.get((key, option, value), {}))
                changes = required.get(option, {})
                if key == "plan.tables.*" and option != "dtype":
                    arguments["plan" if option == "sharding_type" else "kernel"] = value
                else:
                    changes = changes | {f"{key}.{option}": value}
                cases[f"{key}.{option}={value}"] = [f"{name}={value}" for name, value in changes.items()], arguments
    return cases


def list_model_sections(case):
    """Return sections of the model of a case that together have each fixed value of its options."""
    _, section, _ = ALL_CASES[case]
    model = section.get("name", case)
    options = {
        name: [value for value in values if value not in LEFT_OUT.get((model, name), {})]
        for name, values in list_options(MODELS.parts[model]).items()
        if name != "name" and not (name in section and case not in MODELS.parts)
    }
    sections = []
    for turn in range(max(map(len, options.values()), default=1)):
        chosen = {name: values[turn % len(values)] for name, values in options.items()}
        removed = [key for name, value in chosen.items() for key in REMOVED.get((model, name, value), [])]
        kept = {key: value for key, value in section.items() if key not in removed}
        sections.append({"name": model} | kept | chosen)
    return sections


def describe_without_device(value):
    """Describe a recomputed tensor; autograd drops the stand-in's class, so its device seems to differ."""
    return value.shape, value.dtype


def train_cases(rank, world, cases, folder):
    """Train each case on a stand-in GPU; return {name: error} of the cases that failed."""
    errors = {}
    for number, (name, (changes, arguments)) in enumerate(cases.items()):
        try:
            made = loop.make_worker_loop(rank, world, STEPS, changes, f"{folder}/{number}", **arguments)
            with patch.dict(checkpoint._allowed_determinism_checks_to_fns, default=describe_without_device):
                made.train(STEPS)
            made.error and errors.setdefault(name, made.error)
        except (RuntimeError, ConfigError, NotImplementedError) as error:
            errors[name] = f"{type(error).__name__}: {error}"
            if world > 1:
                break  # other ranks may wait
    return errors


def list_case_groups():
    """Yield (title, (number of ranks, {name: case})) of all cases."""
    for key in SECTIONS:
        yield key, (2, {name: case for name, case in list_section_cases().items() if name.startswith(key)})
    two_tower = {"model": {"name": "two_tower", "towers": {"query": ["user", "a"], "item": ["friends", "tags", "b"]}}}
    losses = {
        name: ([], {"tasks": [{"loss": name, "options": LOSS_OPTIONS.get(name, {})}]} | two_tower)
        for name in loss.parts
        if name not in MODEL_LOSSES
    }
    yield "losses", (2, losses)
    for title, (schema, _, tasks) in ALL_CASES.items():
        arguments = {"schema": Schema.parse(schema.model_dump() | {"labels": ["y", "z"]}, "case"), "tasks": tasks}
        cases = {
            str(model): (["optim.dense.name=adam"], arguments | {"model": model})
            for model in list_model_sections(title)
        }
        yield title, (1, cases)


CASE_GROUPS = dict(list_case_groups())


@pytest.mark.parity
@pytest.mark.parametrize("title", CASE_GROUPS)
def test_each_option_trains_on_gpus(title, tmp_path):
    world, cases = CASE_GROUPS[title]
    assert run_on_ranks(world, train_cases, cases, str(tmp_path), device="cuda") == [{}] * world
