"""Rates from what ranks have seen."""

import numpy as np
import pytest

from raytrec.doctor.measure import fit_lookups, measure_rates, rates_from
from raytrec.doctor.probe import LOOKUPS, TINY_STEPS, lookup_shape
from raytrec.planning.rates import COLLECTIVES, LookupRates


def test_what_a_byte_an_id_and_a_table_take_is_told_apart():
    shapes = [shape for shape in LOOKUPS if shape[0] == "adagrad"]
    true = LookupRates(3e-10, 2e-8, 1e-5)
    took = {shape: true.seconds(*lookup_shape(*shape)) for shape in shapes}
    assert fit_lookups(took) == pytest.approx(true)
    less = {shape: seconds - 1e-5 * shape[1] * 1.5 for shape, seconds in took.items()}
    assert min(fit_lookups(less)) >= 0


def test_the_host_takes_what_is_left_of_tiny_steps():
    one = {f"lookup {shape}": 1e-4 for shape in LOOKUPS} | {"on_gpu": 0.0, "small": 1e-7, "launch": 1e-6}
    one |= {f"matrix {name}": 1e11 for name in ("fp32", "tf32", "bf16")}
    one |= {"copy": 1e10, "stream": 1e9, "tensor": 1e-6}
    for kind in COLLECTIVES:
        one |= {f"{kind} 256, s": 1e-4, f"{kind} {1 << 20}, s": 1e-3}
    one |= {f"step {shape}, s": 0.02 + 1e-4 * shape[0] + 1e-3 * shape[1] for shape in TINY_STEPS}
    slow = {name: value * (3 if name.startswith("step") else 1) for name, value in one.items()}
    fast, slower = (rates_from([[each]] * 2, "cpu") for each in (one, slow))
    assert fast.latency_s["all_to_all"] == 1e-4
    assert fast.bandwidth["all_gather"] == pytest.approx(4 * (2**20 - 256) / 2 / 9e-4)
    assert fast.ranks == 2 and fast.cores >= 1
    share = max(1.0, 2 / fast.cores)
    assert fast.step_s > 0 and fast.feature_s > 0
    assert slower.feature_s - fast.feature_s == pytest.approx(2e-4 / share)
    ways = slower.group_s - fast.group_s, slower.step_s - fast.step_s
    assert sum(ways) == pytest.approx((2 * 0.02 + 2e-3) / share)


@pytest.mark.survive
@pytest.mark.parametrize("ranks", [1, 2])
def test_this_machine_has_rates(ranks):
    lines = []
    rates = measure_rates(ranks, lines.append)
    numbers = [rates.copy, rates.stream, *rates.matrix.values(), *rates.bandwidth.values(), rates.launch_s]
    assert np.isfinite(numbers).all() and min(numbers) > 0
    assert rates.ranks == ranks and rates.step_s + rates.feature_s > 0 and len(lines) == 2
