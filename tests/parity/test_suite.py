"""The sharded run, compared with one plain torch process, over all factors that can cause a difference.

The pairwise selection of cases covers every two values of two factors. `make test` runs the pairwise cases
and the known TorchRec defects on 1 and 2 ranks; `make parity` runs all cases.
"""

from dataclasses import replace

import pytest
from design import FACTORS, FP16_CASES, TORCHREC_DEFECT_CASES, list_all_cases, list_pairwise_cases
from record import assert_parity

CHUNK_CASES = 50
TEST_PLACES = [(2, 1)]  # the place of `make test`


def make_place_params(of):
    return [pytest.param(p, marks=[pytest.mark.parity] if p not in TEST_PLACES else [], id=str(p)) for p in of]


@pytest.mark.slow
@pytest.mark.parametrize("place", make_place_params(FACTORS["place"]))
def test_pairwise_cases_match_one_process(place):
    assert_parity([case for case in list_pairwise_cases() if case.place == place], place)


@pytest.mark.parametrize("place", make_place_params(sorted({case.place for case in TORCHREC_DEFECT_CASES})))
def test_torchrec_defect_cases_match_one_process(place):
    assert_parity([case for case in TORCHREC_DEFECT_CASES if case.place == place], place)


@pytest.mark.parity
@pytest.mark.parametrize("place", [(1, 1), (2, 1), (4, 2)], ids=str)
def test_all_fp16_tables_match_one_process(place):
    """The error is within LIMITS["fp16"] of an fp32 reference with the same initial fp16 values."""
    assert_parity([case for case in FP16_CASES if case.place == place], place)


def iterate_chunks():
    everything = list_all_cases()
    for place in FACTORS["place"]:
        cases = [case for case in everything if case.place == place]
        for start in range(0, len(cases), CHUNK_CASES):
            yield pytest.param(cases[start : start + CHUNK_CASES], place, id=f"{place[0]} ranks, from case {start}")


@pytest.mark.parity
@pytest.mark.parametrize("cases,place", iterate_chunks())
def test_all_combinations_match_one_process(cases, place):
    assert_parity(cases, place)


@pytest.mark.parity
@pytest.mark.parametrize("place", FACTORS["place"], ids=str)
def test_managed_ids_match_one_process(place):
    """The row order of managed ids is arbitrary; rows are compared by id."""
    defects = [case for case in TORCHREC_DEFECT_CASES if case.place == (3, 1) and case.recomputed]
    cases = [case for case in defects + list_pairwise_cases() if case.place == place]
    assert_parity([replace(case, ids="managed") for case in cases], place)
