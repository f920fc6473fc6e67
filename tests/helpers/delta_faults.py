"""Deltas that reach a consumer one by one, with faults, and a replica in this process that follows them."""

import json
import random
import shutil
from pathlib import Path

from served import TOKEN, ServedApp
from waiting import wait_for

from raytrec.deltas.format import format_number
from raytrec.serving.app import Service
from raytrec.serving.bodies import json_response
from raytrec.serving.openapi import Endpoint
from raytrec.serving.served_state import list_endpoints
from raytrec.verification.verify import verify


def list_replica_endpoints(replica, *listed):
    """Return the endpoints of a replica's state, and GET /versions, which lists this and other replicas."""

    async def list_versions(request, scorer):
        return json_response(dict.fromkeys([replica, *listed], scorer.version))

    return [*list_endpoints(replica), Endpoint("GET", "/versions", list_versions)]


class FollowingReplica(ServedApp):
    """HTTP service in this process that follows a folder of deltas; `verify` compares it."""

    def __init__(self, folder, shards=None):
        from raytrec.serving.follow import Follower

        self.follower = Follower(str(folder), make_maker=shards and shards.make_maker(folder))
        endpoints, threads = list_replica_endpoints("one"), 2 if shards else 0
        super().__init__(Service(self.follower.versions, TOKEN, extra_endpoints=endpoints, threads=threads))
        self.follower.start(self.service, self._listener)

    def wait_for(self, number):
        """Wait until delta `number` is applied."""
        wait_for(lambda: self.follower.position.number == number and not self.follower.problem, f"delta {number}", 60)

    def wait_for_refusal(self, number):
        text = f"delta {number} cannot be applied"
        wait_for(lambda: text in (self.follower.problem or ""), text, 60)


class DeltaFeed:
    """Folder that receives the oldest full export of another folder, and then its deltas one by one.

    Attributes:
        first: number of the export.
        last: number of the last delta.
        steps: number of each delta → step to which it leads.
    """

    def __init__(self, source, target):
        self._source, self.target = Path(source), Path(target)
        (self.target / "deltas").mkdir(parents=True)
        shutil.copy(self._source / "stream.json", self.target)
        names = sorted(path.parent.name for path in self._source.glob("exports/*/manifest.json"))
        shutil.copytree(self._source / "exports" / names[0], self.target / "exports" / names[0])
        numbers = [int(path.stem) for path in self._source.glob("deltas/*.json")]
        self.first, self.last = int(names[0]), max(numbers)
        self.steps = {number: json.loads(self.read(number))["step"] for number in numbers if number >= self.first}
        self.deliver(self.first)

    def read(self, number):
        """Return the bytes of a delta's manifest."""
        return (self._source / f"deltas/{format_number(number)}.json").read_bytes()

    def copy_files(self, number):
        """Copy the files of a delta, and return their paths."""
        for folder in (self._source / "deltas").glob(f"{format_number(number)}-*"):
            shutil.copytree(folder, self.target / "deltas" / folder.name, dirs_exist_ok=True)
        return sorted(path for path in self.target.glob(f"deltas/{format_number(number)}-*/*") if path.stat().st_size)

    def write_manifest(self, number, content):
        path = self.target / f"deltas/{format_number(number)}.json"
        path.with_suffix(".tmp").write_bytes(content)
        path.with_suffix(".tmp").rename(path)

    def deliver(self, number):
        """Copy a delta, without faults."""
        self.copy_files(number)
        self.write_manifest(number, self.read(number))

    def withdraw(self, number):
        (self.target / f"deltas/{format_number(number)}.json").unlink(missing_ok=True)


def cut_file(feed, number, rng):
    path = rng.choice(feed.copy_files(number))
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])
    feed.write_manifest(number, feed.read(number))


def change_file(feed, number, rng):
    path = rng.choice(feed.copy_files(number))
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    feed.write_manifest(number, feed.read(number))


def lose_file(feed, number, rng):
    rng.choice(feed.copy_files(number)).unlink()
    feed.write_manifest(number, feed.read(number))


def cut_manifest(feed, number, rng):
    content = feed.read(number)
    feed.write_manifest(number, content[: rng.randrange(len(content))])


def repeat_delta(feed, number, rng):
    feed.write_manifest(number, feed.read(number - 1))


def swap_deltas(feed, number, rng):
    feed.copy_files(number)
    feed.write_manifest(number, feed.read(number + 1))
    feed.copy_files(number + 1)
    feed.write_manifest(number + 1, feed.read(number))


def skip_delta(feed, number, rng):
    feed.deliver(number + 1)


def send_foreign_delta(feed, number, rng):
    feed.copy_files(number)
    feed.write_manifest(number, json.dumps(json.loads(feed.read(number)) | {"stream": "another"}).encode())


def send_other_branch(feed, number, rng):
    feed.copy_files(number)
    feed.write_manifest(number, json.dumps(json.loads(feed.read(number)) | {"parent": "0" * 64}).encode())


FAULTS = (
    *(cut_file, change_file, lose_file, cut_manifest, repeat_delta),
    *(swap_deltas, skip_delta, send_foreign_delta, send_other_branch),
)
RESTART = "restart"


def follow_through_faults(feed, find_checkpoint, seed, shards=None):
    """Deliver all deltas to a replica, most of them with a fault first, and compare the replica with each checkpoint.

    Args:
        feed: deltas.
        find_checkpoint: function that returns the folder of the checkpoint to which a delta leads, or None.
        seed: seed of the faults.
        shards: local table shards, some of which are replaced before a delta; None: the replica maps the tables.

    Returns:
        (names of the faults, number of comparisons).
    """
    rng, faults, comparisons = random.Random(seed), [], 0
    planned = [fault for _ in range(feed.last) for fault in rng.sample((*FAULTS, RESTART), len(FAULTS) + 1)]
    replica = FollowingReplica(feed.target, shards)
    try:
        for number in range(feed.first + 1, feed.last + 1):
            if number < feed.last and rng.random() < 0.9:
                faults.append(fault := planned.pop())
                if fault is RESTART:
                    replica.close()
                    replica = FollowingReplica(feed.target, shards)
                else:
                    fault(feed, number, rng)
                    replica.wait_for_refusal(number)
                assert replica.follower.position.number == number - 1
                feed.withdraw(number + 1)
            if shards and rng.random() < 0.5:
                shards.replace(rng.randrange(len(shards.shards)))
            feed.deliver(number)
            replica.wait_for(number)
            if folder := find_checkpoint(number):
                result = verify(replica.url, folder)
                assert result.metrics["result"] == "equal", (number, faults, result.next_steps)
                comparisons += 1
    finally:
        replica.close()
    return [getattr(fault, "__name__", fault) for fault in faults], comparisons
