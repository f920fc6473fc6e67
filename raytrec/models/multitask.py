"""Models for several tasks: shared bottom, mixtures of experts, ESMM and DBMTL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from raytrec.config.models.multitask import DBMTLSection, ESMMSection, MMoESection, PLESection, SharedBottomSection
from raytrec.config.schema import Schema
from raytrec.models.parts.layers import ConcatInputs, mlp, mlp_and_linear


class SharedBottom(nn.Module):
    """Shared bottom: the logits of task k are towerₖ(MLP(concatenated dense columns and embeddings)).

    Caruana 1997, "Multitask Learning", Machine Learning 28.

    Args:
        schema: Schema with any dense columns and sparse features of any dims.
        config: Layer sizes and dropout.
        tasks: Task → number of its logit columns.
    """

    def __init__(self, schema: Schema, config: SharedBottomSection, tasks: Mapping[str, int]):
        super().__init__()
        self.concat_inputs = ConcatInputs(schema)
        self.bottom = mlp([self.concat_inputs.width, *config.bottom_mlp], config.dropout)
        self.towers = TaskTowers(config.bottom_mlp[-1], config.tower_mlp, tasks, config.dropout)
        self.count = len(tasks)

    def forward(self, dense: torch.Tensor, pooled: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the logits of all tasks in order, float32 [B, columns]; [B] if there is a single column."""
        shared_BN = self.bottom(self.concat_inputs(dense, pooled))
        return self.towers([shared_BN] * self.count)


class MMoE(nn.Module):
    """Multi-gate mixture of experts: the logits of task k are towerₖ(Σₑ softmax(Wₖ x)ₑ · expertₑ(x)).

    Ma et al. 2018, doi:10.1145/3219819.3220007, equations 6 and 7. x is the concatenation of dense columns
    and embeddings.

    Args:
        schema: Schema with any dense columns and sparse features of any dims.
        config: Experts, layer sizes and dropout.
        tasks: Task → number of its logit columns.
    """

    def __init__(self, schema: Schema, config: MMoESection, tasks: Mapping[str, int]):
        super().__init__()
        self.concat_inputs = ConcatInputs(schema)
        width = self.concat_inputs.width
        self.experts = Experts(config.experts, width, config.expert_mlp, config.dropout)
        self.gates = nn.ModuleList(Gate(width, config.experts) for _ in tasks)
        self.towers = TaskTowers(config.expert_mlp[-1], config.tower_mlp, tasks, config.dropout)

    def forward(self, dense: torch.Tensor, pooled: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the logits of all tasks in order, float32 [B, columns]; [B] if there is a single column."""
        x_BN = self.concat_inputs(dense, pooled)
        experts_BEM = self.experts(x_BN)
        return self.towers([gate(x_BN, experts_BEM) for gate in self.gates])


class PLE(nn.Module):
    """Progressive layered extraction: levels of experts and gates, then a tower for each task.

    Tang et al. 2020, doi:10.1145/3383313.3412236. The first level reads x, the concatenation of dense columns
    and embeddings. Every later level reads the previous level's outputs, which are one output for each task and
    a shared output. With a single level, PLE is customized gate control (CGC).

    Args:
        schema: Schema with any dense columns and sparse features of any dims.
        config: Number of levels, experts, layer sizes and dropout.
        tasks: Task → number of its logit columns.
    """

    def __init__(self, schema: Schema, config: PLESection, tasks: Mapping[str, int]):
        super().__init__()
        self.concat_inputs, self.count = ConcatInputs(schema), len(tasks)
        widths = [self.concat_inputs.width, *[config.expert_mlp[-1]] * (config.levels - 1)]
        self.levels = nn.ModuleList(
            Level(width, self.count, config, last=place == config.levels - 1) for place, width in enumerate(widths)
        )
        self.towers = TaskTowers(config.expert_mlp[-1], config.tower_mlp, tasks, config.dropout)

    def forward(self, dense: torch.Tensor, pooled: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the logits of all tasks in order, float32 [B, columns]; [B] if there is a single column."""
        inputs = [self.concat_inputs(dense, pooled)] * (self.count + 1)
        for level in self.levels:
            inputs = level(inputs)
        return self.towers(inputs)


class Level(nn.Module):
    """One level of PLE (equations 4 to 7).

    The level reads one vector xₖ for each task k, and a shared vector x. The experts of task k read xₖ, and the
    shared experts read x. The output for task k is Σₑ softmax(Wₖ xₖ)ₑ · (output of expert e) over the task's experts
    and the shared experts. The shared output is the mean of the outputs of all tasks' experts and the shared
    experts, weighted by softmax(W x). The last level has no shared output.

    Args:
        inputs: Width of xₖ and of x.
        tasks: Number of tasks.
        config: Numbers of experts, layer sizes and dropout.
        last: True for the last level.
    """

    def __init__(self, inputs: int, tasks: int, config: PLESection, last: bool):
        super().__init__()
        per_task, shared = config.task_experts, config.shared_experts
        counts = [per_task] * tasks + [shared]
        self.experts = nn.ModuleList(Experts(count, inputs, config.expert_mlp, config.dropout) for count in counts)
        gate_sizes = [per_task + shared] * tasks + [sum(counts)] * (not last)
        self.gates = nn.ModuleList(Gate(inputs, count) for count in gate_sizes)

    def forward(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the output for each task, float [B, expert_mlp[-1]], then the shared output unless `last` is set.

        Args:
            inputs: xₖ for each task, then x; each is float [B, inputs].
        """
        *outputs, shared_BEM = (experts(x_BN) for experts, x_BN in zip(self.experts, inputs, strict=True))
        joined = [torch.cat([of_task_BEM, shared_BEM], dim=1) for of_task_BEM in outputs]
        joined.append(torch.cat([*outputs, shared_BEM], dim=1))
        # The last level has no gate for the shared output, so zip omits the last input.
        return [gate(x_BN, experts) for gate, x_BN, experts in zip(self.gates, inputs, joined, strict=False)]


class TaskTowers(nn.Module):
    """Towers: for each task, an MLP with a linear last layer, which returns the task's logits.

    Args:
        inputs: Width of each tower's input.
        sizes: Hidden sizes of a tower.
        tasks: Task → number of its logit columns.
        dropout: Dropout rate of the hidden layers.
    """

    def __init__(self, inputs: int, sizes: list[int], tasks: Mapping[str, int], dropout: float):
        super().__init__()
        # Modules are not named after tasks, because nn.Module may have a method with the name of a task.
        self.towers = nn.ModuleList(mlp([inputs, *sizes], dropout) for _ in tasks)
        last = (sizes or [inputs])[-1]
        self.logits = nn.ModuleList(nn.Linear(last, columns) for columns in tasks.values())

    def forward(self, of_tasks: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the logits of all tasks in order, float32 [B, columns]; [B] if there is a single column.

        Args:
            of_tasks: Input of each task's tower, in the order of the tasks, float [B, inputs] each.
        """
        layers = zip(self.towers, self.logits, of_tasks, strict=True)
        return torch.cat([logit(tower(x_BN)) for tower, logit, x_BN in layers], dim=1).squeeze(1)


class Experts(nn.Module):
    """MLPs of equal sizes that read the same input: float [B, inputs] → [B, count, sizes[-1]]."""

    def __init__(self, count: int, inputs: int, sizes: list[int], dropout: float):
        super().__init__()
        self.experts = nn.ModuleList(mlp([inputs, *sizes], dropout) for _ in range(count))

    def forward(self, x_BN: torch.Tensor) -> torch.Tensor:
        """Return the outputs of all experts, float [B, count, sizes[-1]]."""
        return torch.stack([expert(x_BN) for expert in self.experts], dim=1)


class Gate(nn.Module):
    """Gate Σₑ softmax(W x)ₑ · (output of expert e), a mean of the experts' outputs with weights that depend on x.

    Args:
        inputs: Width of x.
        experts: Number of experts.
    """

    def __init__(self, inputs: int, experts: int):
        super().__init__()
        self.scores = nn.Linear(inputs, experts, bias=False)

    def forward(self, x_BN: torch.Tensor, experts_BEM: torch.Tensor) -> torch.Tensor:
        """Return the weighted mean of the experts' outputs: float [B, inputs] and [B, experts, M] → [B, M]."""
        weights_BE = self.scores(x_BN).softmax(dim=1)
        return torch.einsum("be,bem->bm", weights_BE, experts_BEM)


class ESMM(nn.Module):
    """ESMM: P(click and conversion) = P(click) · P(conversion | click), with two towers that share the embeddings.

    Ma et al. 2018, arXiv:1804.07931. The click tower returns the click logit a, with P(click) = σ(a). The
    conversion tower returns b, with P(conversion | click) = σ(b), which has no separate label. The output for the
    conversion task is the logit of p = σ(a) · σ(b), so the conversion tower is trained on all impressions.
    Since (1 − p) ÷ p = (1 + e⁻ᵃ)(1 + e⁻ᵇ) − 1, the logit of p is −ln(e⁻ᵃ + e⁻ᵇ + e⁻ᵃ⁻ᵇ), which is accurate
    even for p near 0 or 1. P(conversion | click) is the quotient of the two predictions.

    Args:
        schema: Schema with any dense columns and sparse features of any dims.
        config: Names of the click and conversion tasks, layer sizes and dropout.
        tasks: The click and the conversion task, in the order of their columns, each with one column.
    """

    def __init__(self, schema: Schema, config: ESMMSection, tasks: Mapping[str, int]):
        super().__init__()
        self.concat_inputs = ConcatInputs(schema)
        layers = self.concat_inputs.width, config.tower_mlp, 1, config.dropout
        self.click, self.conversion = (nn.Sequential(*mlp_and_linear(*layers)) for _ in range(2))
        self.click_first = next(iter(tasks)) == config.click

    def forward(self, dense: torch.Tensor, pooled: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the logits of P(click) and P(click and conversion), float32 [B, 2], in the order of the tasks."""
        x_BN = self.concat_inputs(dense, pooled)
        click_B1, given_click_B1 = self.click(x_BN).float(), self.conversion(x_BN).float()
        against_B3 = torch.cat([-click_B1, -given_click_B1, -click_B1 - given_click_B1], dim=1)
        both_B1 = -against_B3.logsumexp(dim=1, keepdim=True)
        return torch.cat([click_B1, both_B1] if self.click_first else [both_B1, click_B1], dim=1)


class DBMTL(nn.Module):
    """DBMTL: P(labels | x) = Πₖ P(label k | x, labels of k's parent tasks), modeled in the layers below the logits.

    Wang et al. 2019, arXiv:1902.09154. s is the output of shared layers over the concatenated dense columns
    and embeddings, and tₖ = towerₖ(s). For each task k, rₖ = MLPₖ(concatenation of tₖ and rⱼ for all parents j of
    k), where the parents are the tasks on which task k depends (model.relations; if it is null, all previous
    tasks). The logits of task k are linear in rₖ.

    Args:
        schema: Schema with any dense columns and sparse features of any dims.
        config: Relations, layer sizes and dropout.
        tasks: Task → number of its logit columns.

    Raises:
        ConfigError: model.relations names an unknown task or contains a cycle.
    """

    def __init__(self, schema: Schema, config: DBMTLSection, tasks: Mapping[str, int]):
        super().__init__()
        self.concat_inputs = ConcatInputs(schema)
        self.bottom = mlp([self.concat_inputs.width, *config.bottom_mlp], config.dropout)
        shared = (config.bottom_mlp or [self.concat_inputs.width])[-1]
        places = {name: place for place, name in enumerate(tasks)}
        # Maps the index of a task to the indices of its parent tasks, in topological order.
        self.parents = {
            places[name]: [places[parent] for parent in parents] for name, parents in config.order(tasks).items()
        }
        tower_width, related = config.tower_mlp[-1], config.relation_mlp[-1]
        self.towers = nn.ModuleList(mlp([shared, *config.tower_mlp], config.dropout) for _ in tasks)
        self.relations = nn.ModuleList(
            mlp([tower_width + len(self.parents[place]) * related, *config.relation_mlp], config.dropout)
            for place in range(len(tasks))
        )
        self.logits = nn.ModuleList(nn.Linear(related, columns) for columns in tasks.values())

    def forward(self, dense: torch.Tensor, pooled: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the logits of all tasks in order, float32 [B, columns]; [B] if there is a single column."""
        shared_BN = self.bottom(self.concat_inputs(dense, pooled))
        related: dict[int, torch.Tensor] = {}
        for place, parents in self.parents.items():
            tower_BM = self.towers[place](shared_BN)
            inputs = torch.cat([tower_BM, *(related[parent] for parent in parents)], dim=1)
            related[place] = self.relations[place](inputs)
        logits = [logit(related[place]) for place, logit in enumerate(self.logits)]
        return torch.cat(logits, dim=1).squeeze(1)
