import pickle

from raytrec.common.errors import DataError, RunError, get_root_cause


def test_errors_show_their_parts_after_pickling():
    error = pickle.loads(pickle.dumps(DataError("bad", where="file", expected="good", do="mend")))
    assert isinstance(error, DataError)
    assert str(error) == "bad\n  where:    file\n  expected: good\n  do:       mend"


def test_root_cause_is_found_inside_wrappers():
    class WorkerGroupError(Exception):
        def __init__(self, failures):
            self.worker_failures = failures

    inner = DataError("bad")
    wrapped = RuntimeError("task failed")
    wrapped.cause = inner
    assert get_root_cause(WorkerGroupError({0: ValueError("collateral"), 1: wrapped})) is inner
    plain = ValueError("x")
    assert get_root_cause(plain) is plain
    assert get_root_cause(RunError("r")).what == "r"
