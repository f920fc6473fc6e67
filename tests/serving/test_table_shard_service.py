"""`raytrec serve --table-shards`: promotions and killed shards while clients send requests, and the end."""

from collections import Counter
from functools import partial

import psutil
import pytest
from services import run_service
from test_service import Load, exports  # noqa: F401
from waiting import wait_for

from raytrec.serving.command import promote

pytestmark = pytest.mark.survive


def test_service_with_shards_survives_killed_shards_and_promotions(exports, tmp_path):  # noqa: F811
    made, _ = exports
    options = ["--table-shards", "2", "--table-timeout-ms", "20000", "--table-cache-mib", "0"]
    with run_service(made["whole"].path, 2, tmp_path, options=options) as service:
        find_shards = partial(service.family, "ray::TableShard")
        with Load(service, exports, clients=3) as load:
            for name in ("small", "whole"):
                version = made[name].version
                assert promote(made[name].path, service=service.url, name=None) == version
                wait_for(lambda: len(find_shards()) == 2, "two shards", 120)
                for shard in find_shards():
                    shard.kill()
                before = Counter(load.counts)
                wait_for(lambda v=version, b=before: load.counts[v] > b[v] + 10, "answers", 120)
        family = service.family()
    assert set(load.failed) == {"<HTTPError 503: 'Service Unavailable'>"}, "requests were answered without shards"
    assert load.counts.keys() == {made["whole"].version, made["small"].version}
    _, alive = psutil.wait_procs(family, 20)
    assert not alive
