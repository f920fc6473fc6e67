"""Models written once more, from their definitions, over the weights of ours: plain functions of tensors."""

import torch
from torch.nn.functional import linear


def layers(weights, name, x, count, step=2, activation=torch.relu):
    """`count` linear layers name.0, name.step, … with an activation after each."""
    for i in range(count):
        x = activation(linear(x, weights[f"{name}.{i * step}.weight"], weights[f"{name}.{i * step}.bias"]))
    return x


def dcn(model, dense, vectors, *, bottom, cross, rank, top, parallel):
    """Wang et al. 2021, equation 3 (and 4 with a rank), row by row for the products."""
    w = dict(model.named_parameters())
    x0 = torch.cat([layers(w, "bottom", dense, bottom), *vectors], 1)
    x = x0
    for i in range(cross):
        if rank:
            matrix = w[f"cross.layers.{i}.1.weight"] @ w[f"cross.layers.{i}.0.weight"]
            bias = w[f"cross.layers.{i}.1.bias"]
        else:
            matrix, bias = w[f"cross.layers.{i}.0.weight"], w[f"cross.layers.{i}.0.bias"]
        x = torch.stack([x0[b] * (matrix @ x[b] + bias) + x[b] for b in range(len(x))])
    last = torch.cat([x, layers(w, "deep", x0, top)], 1) if parallel else layers(w, "deep", x, top)
    return linear(last, w["logit.weight"], w["logit.bias"])[:, 0]


def tower(model, side, inputs, hidden):
    """An MLP with a linear last layer."""
    w = {k.removeprefix(f"towers.{side}."): v for k, v in model.named_parameters()}
    return linear(layers(w, "hidden", inputs, hidden), w["last.weight"], w["last.bias"])


def attention(model, index, history, target, sizes):
    """One row: history is a list of vectors, the most recent first; the mean of them, each weighted."""
    w = {k.removeprefix(f"attention.{index}."): v for k, v in model.named_parameters()}
    if not history:
        return torch.zeros_like(target)
    scores = []
    for place, e in enumerate(history):
        h = layers(
            w, "score", torch.cat([e, target, e - target, e * target]), sizes, activation=torch.sigmoid
        )
        scores.append((w[f"score.{2 * sizes}.weight"] @ h)[0] + w["recency"][place])
    return sum(e / (1 + (-s).exp()) for s, e in zip(scores, history, strict=True)) / len(history)


def dlrm(model, prefix, dense, vectors, *, bottom, top):
    """Dot products of all pairs, then an MLP."""
    w = {k.removeprefix(prefix): v for k, v in model.named_parameters()}
    x = layers(w, "bottom", dense, bottom)
    all_ = [x, *vectors]
    pairs = [(all_[i] * all_[j]).sum(1) for i in range(len(all_)) for j in range(i + 1, len(all_))]
    h = layers(w, "top", torch.cat([x, torch.stack(pairs, 1)], 1), top)
    return linear(h, w["logit.weight"], w["logit.bias"])[:, 0]
