"""Rates computed from the measurements of ranks."""

import numpy as np
import pytest

from raytrec.doctor.child import measure_rates
from raytrec.embeddings.optimizers import OPTIMIZERS
from raytrec.planning.probe import compute_rates, count_lookup_work, fit_lookup_rates, list_lookups
from raytrec.planning.rates import COLLECTIVES, DENSE, LookupRates, Rates


def test_lookup_fit_separates_cost_per_byte_id_and_table():
    shapes = [lookup for lookup in list_lookups("cpu") if lookup[0] == "adagrad"]
    true = LookupRates(3e-10, 2e-8, 1e-5)
    took = {shape: true.seconds(*count_lookup_work(*shape)) for shape in shapes}
    assert fit_lookup_rates(took) == pytest.approx(true)
    less = {shape: seconds - 1e-5 * shape[1] * 1.5 for shape, seconds in took.items()}
    assert min(fit_lookup_rates(less)) >= 0


def test_rates_are_medians_of_samples():
    one = {f"lookup {lookup}": 1e-4 for lookup in list_lookups("cpu")} | {"on_gpu": 0.0}
    one |= {f"matrix {name}": 1e11 for name in ("fp32", "tf32", "bf16")} | {"copy": 1e10, "stream": 1e9}
    for kind in COLLECTIVES:
        one |= {f"{kind} 256": 1e-4, f"{kind} {1 << 20}": 1e-3}
    found = compute_rates([[one, one | {"copy": 1.0}, one]] * 2)
    assert (found.copy, found.ranks, found.device) == (1e10, 2, "cpu") and found.cores >= 1
    assert found.latency_s["all_to_all"] == 1e-4
    assert found.bandwidth["all_gather"] == pytest.approx(4 * (2**20 - 256) / 2 / 9e-4)
    assert found.step_s == Rates.for_cpu(2).step_s > 0


def test_lookup_benchmarks_cover_all_optimizers():
    assert {way for way, *_ in list_lookups("cuda")} == {*OPTIMIZERS.parts, DENSE}
    assert {way for way, *_ in list_lookups("cpu")} == {*Rates.for_cpu(1).lookup}


@pytest.mark.survive
@pytest.mark.parametrize("ranks", [1, 2])
def test_measured_rates_are_positive_and_finite(ranks):
    lines = []
    rates = measure_rates(ranks, lines.append)
    numbers = [rates.copy, rates.stream, *rates.matrix.values(), *rates.bandwidth.values(), rates.launch_s]
    assert np.isfinite(numbers).all() and min(numbers) > 0
    assert rates.ranks == ranks and len(lines) == 2
