"""`raytrec serve --table-shards`: promotions and killed shards while clients send requests, and the end."""

import json
import threading
import time
import urllib.error
from collections import Counter
from functools import partial

import numpy as np
import psutil
import pytest
from services import TOKEN, export_in_all_precisions, run_service
from waiting import wait_for

from raytrec.serving.command import promote

pytestmark = pytest.mark.survive


def test_service_with_shards_survives_killed_shards_and_promotions(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYTREC_SERVE_TOKEN", TOKEN)
    made, table = export_in_all_precisions(tmp_path)
    rows, counts, wrong, stop = table.to_pylist(), Counter(), [], threading.Event()
    expected = {each.version: each.model.predict(table).to_pydict() for each in made.values()}
    options = ["--table-shards", "2", "--table-timeout-ms", "20000", "--table-cache-mib", "0"]

    def send_requests(service):
        while not stop.is_set():
            try:
                answer = service.ask("/predict", {"rows": rows})
            except urllib.error.HTTPError as error:
                body = json.loads(error.read())
                counts[error.code] += 1
                wrong.extend([body] if error.code != 503 else [])
                time.sleep(0.1)
                continue
            counts[answer["version"]] += 1
            for name, values in expected[answer["version"]].items():
                if not np.allclose(answer["predictions"][name], values, rtol=1e-6, atol=1e-6):
                    wrong.append(answer)

    with run_service(made["whole"].path, 2, tmp_path, options=options) as service:
        threads = [threading.Thread(target=send_requests, args=[service]) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for name in ("small", "whole"):
                assert promote(made[name].path, service=service.url, name=None) == made[name].version
                find_shards = partial(service.family, "ray::TableShard")
                wait_for(lambda: len(find_shards()) == 2, "two shards", 120)  # noqa: B023
                for shard in find_shards():
                    shard.kill()
                before = Counter(counts)
                wait_for(lambda: counts[made[name].version] > before[made[name].version] + 10, "answers", 120)  # noqa: B023
        finally:
            stop.set()
            for thread in threads:
                thread.join(60)
        family = service.family()
    assert counts[503], "requests were answered without shards"
    assert not wrong and counts[made["whole"].version] and counts[made["small"].version], (counts, wrong[:2])
    _, alive = psutil.wait_procs(family, 20)
    assert not alive
