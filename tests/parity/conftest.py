"""`make parity` writes benchmarks/results/parity.json if all tests ran and none failed.

Each part takes minutes, and longer on a busy machine.
"""

import pytest
import ranks

PART_TIMEOUT_S = 1200


def _is_whole(config):
    return config.option.markexpr == "parity or not parity"


def pytest_collection_modifyitems(config, items):
    if not _is_whole(config) and config.option.markexpr != "parity":  # make test, make test-slow
        return
    import record

    record.steps, ranks.CALL_TIMEOUT_S = record.STEPS, PART_TIMEOUT_S
    for item in items:
        item.add_marker(pytest.mark.timeout(PART_TIMEOUT_S + 60))


def pytest_sessionfinish(session):
    left_out = session.config.option.keyword or session.config.args != ["tests/parity"]
    if _is_whole(session.config) and not (session.testsfailed or left_out):
        import record

        record.write()
