"""Faults in the maps of managed ids: the check detects each fault and names its kind and place."""

from dataclasses import replace

import managed_ids
import pytest
from loops import ROW_WISE, failed_outcomes, train_with_checks
from ranks import run_on_ranks

USER_TABLE = 0  # index of table `user` among the tables with managed ids


def run(rank, world, fault, settings):
    return train_with_checks(rank, world, ROW_WISE, fault, schema=managed_ids.managed_schema(), **settings)


def assign_row_twice(scene):
    """Assign the row of the second id of rank 1 to its first id."""
    if scene.rank == 1:
        one = scene.step.maps["user"]._maps.rows
        slots = one.find_occupied_slots(USER_TABLE)
        one.fields["row"][slots[0]] = one.fields["row"][slots[1]]


def assign_fallback_row(scene):
    if scene.rank == 1:
        one = scene.step.maps["user"]._maps.rows
        one.fields["row"][one.find_occupied_slots(USER_TABLE)[0]] = scene.step.maps["user"].capacity


def free_assigned_row(scene):
    import torch

    free = scene.step.maps["user"]._maps.free
    free[USER_TABLE] = replace(free[USER_TABLE], left=torch.cat([free[USER_TABLE].left, torch.tensor([3])]))


def free_row_on_rank_1(scene):
    if scene.rank == 1:
        free_assigned_row(scene)


def insert_id_of_another_rank(scene):
    import torch

    from raytrec.embeddings.managed.key_map import KeyEntries

    if scene.rank == 0:
        nothing = torch.zeros(1, dtype=torch.int64)  # 0 is the smallest key of rank 1
        fields = dict.fromkeys(("row", "sightings", "last"), nothing)
        tables = torch.full_like(nothing, USER_TABLE)
        scene.step.maps["user"]._maps.rows.insert(tables, [1, 0], KeyEntries(nothing, fields))


@pytest.mark.parametrize(
    "fault,text",
    [
        (assign_row_twice, "table user: at least one row has several ids"),
        (assign_fallback_row, "table user: rank 1 has 1 id whose row is outside 0 to 13"),
        (free_assigned_row, "sum to 15, but the table has 14 rows for ids"),
        (free_row_on_rank_1, "table user: the free rows of rank 1 differ from those of rank 0"),
        (insert_id_of_another_rank, "table user: rank 0 has 1 id that another rank owns"),
    ],
)
def test_id_map_faults_are_detected(fault, text):
    found = failed_outcomes(run_on_ranks(2, run, fault, {}), "managed_ids")
    assert found[0]["step"] == 6 and text in found[0]["text"]


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 3])
def test_managed_ids_check_passes_without_a_fault(world):
    answers = run_on_ranks(world, run, None, {"steps": 8, "every": 2})  # many ids are new at the first checks
    assert not failed_outcomes(answers)
    assert {"managed_ids", "parity", "conservation"} <= {o["check"] for o in answers[0]}


def test_summed_audits_give_the_same_verdict():
    from raytrec.embeddings.managed.row_map import HASH_MASK, MapAudit, describe_audit_errors, is_one_to_one

    good = [MapAudit(rank, 5, [], (-1) ** rank * 7 & HASH_MASK, (2, 9, 3)) for rank in range(4)]
    good[3] = replace(good[3], sum=(good[3].sum - 9) & HASH_MASK)

    def summed(audits):
        wrong, ids, total = (sum(column) for column in zip(*(a.numbers for a in audits), strict=True))
        return is_one_to_one(audits[0], [wrong, ids, total], 25)

    assert describe_audit_errors(good, 25) == [] and summed(good) and describe_audit_errors(good, 24) != []
    assert all(-(2**63) <= number < 2**63 for audit in good for number in audit.numbers)
    for change in ({"errors": ["rank 2 has 1 duplicate ids"]}, {"sum": 5}, {"ids": 6}):
        changed = [*good[:2], replace(good[2], **change), good[3]]
        assert describe_audit_errors(changed, 25) and not summed(changed)
