"""Dropout, compared with its definition: values are 0, or divided by the keep probability."""

import pytest
import torch

from raytrec.models.parts.layers import Dropout

ROWS, WIDTH = 4001, 63  # not a multiple of 4 values


@pytest.mark.parametrize("rate", [0.05, 0.2, 0.5, 0.9])
def test_dropout_zeroes_values_at_random_and_scales_the_rest(rate):
    torch.manual_seed(1)
    x = torch.rand(ROWS, WIDTH, dtype=torch.float64).add_(1).requires_grad_()
    out = Dropout(rate)(x)
    kept = out != 0
    torch.testing.assert_close(out, x * kept / (1 - rate), rtol=2e-4, atol=0)
    # The rate is equal in each quarter of 64 bits and in each column; neighboring values are independent.
    error = 5 * (rate * (1 - rate)) ** 0.5
    for part in (*(kept.flatten()[place::4] for place in range(4)), *kept.unbind(1)):
        assert abs(part.double().mean() - (1 - rate)) < error / len(part) ** 0.5
    for step in (1, 2, 4, WIDTH):
        both = (kept.flatten()[step:] & kept.flatten()[:-step]).double().mean()
        assert abs(both - (1 - rate) ** 2) < error / (ROWS * WIDTH) ** 0.5
    out.sum().backward()
    torch.testing.assert_close(x.grad, kept.double() / (1 - rate), rtol=2e-4, atol=0)


def test_dropout_masks_depend_only_on_the_seed():
    x, masks = torch.ones(ROWS, 3), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        masks.append([Dropout(0.5)(x) for _ in range(2)])
    assert all(torch.equal(*pair) for pair in zip(*masks[:2], strict=True))
    assert not torch.equal(masks[0][0], masks[0][1]) and not torch.equal(masks[0][0], masks[2][0])


@pytest.mark.parametrize("rate,training", [(0.0, True), (1e-9, True), (0.5, False)])
def test_dropout_keeps_all_values_in_eval_or_at_rate_zero(rate, training):
    x = torch.randn(5, 3)
    torch.testing.assert_close(Dropout(rate).train(training)(x), x)


def test_dropout_at_rate_one_zeroes_everything():
    assert not Dropout(1.0)(torch.randn(5, 3)).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dropout_keeps_the_dtype(dtype):
    out = Dropout(0.5)(torch.ones(ROWS, 2, dtype=dtype))
    assert out.dtype == dtype and set(out.unique().tolist()) == {0.0, 2.0}
