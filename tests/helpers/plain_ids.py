"""Reference implementation of a managed id map in plain Python."""

from collections import Counter

UINT64_MASK = 2**64 - 1


def splitmix64(number):
    """Return the splitmix64 hash of an integer as a signed integer."""
    bits = (number + 0x9E3779B97F4A7C15) & UINT64_MASK
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & UINT64_MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & UINT64_MASK
    bits ^= bits >> 31
    return bits - 2**64 if bits >= 2**63 else bits


class ReferenceIdMap:
    """Map from ids of one table to rows. Rows are numbered in the order of their first assignment.

    Args:
        rows: number of rows of the table.
        policy: a ManagedIds section.
        seed: seed of random draws.
    """

    def __init__(self, rows, policy, seed=0):
        self.capacity, self.policy, self.seed = rows - policy.fallback_rows, policy, seed
        self.rows, self.waiting = {}, {}  # id → [row, sightings, last]; id → [sightings, last]
        self.free = list(range(self.capacity))
        self.new, self.left = {}, []

    def step(self, step, ids):
        """Process a global batch of ids and return id → row, or None if the id has no row."""
        counts = Counter(ids)
        self.new, self.left = {}, []
        wanted = [i for i in sorted(counts, key=splitmix64) if self._wants(i, counts[i], step)]
        self._expire(step)
        self._trim(step)
        missing = len(wanted) - len(self.free)
        if missing > 0 and self.policy.eviction != "none":
            old = sorted((i for i in self.rows if self.rows[i][2] < step), key=self._worth)
            self._leave(old[: self._to_free(missing)])
        for i in self._chosen(wanted, counts, step):
            sightings = self.waiting.pop(i, [counts[i]])[0]
            self.new[i] = self.free.pop(0)
            self.rows[i] = [self.new[i], sightings, step]
        return {i: self.rows.get(i, [None])[0] for i in counts}

    def _wants(self, i, count, step):
        if i in self.rows:
            self.rows[i][1:] = self.rows[i][1] + count, step
            return False
        sightings = count
        if self.policy.admit_after > 1:
            sightings += self.waiting.get(i, [0])[0]
            self.waiting[i] = [sightings, step]
        return sightings >= self.policy.admit_after

    def _draw(self, i, step):
        salt = splitmix64((self.seed ^ splitmix64(step)) & UINT64_MASK)
        return splitmix64((splitmix64(i) ^ salt) & UINT64_MASK) & UINT64_MASK

    def _to_free(self, missing):
        least = max(1, self.capacity // 64)
        if self.policy.eviction != "lru":
            return least
        return max(missing, least, min(4 * missing, self.capacity // 4))

    def _chosen(self, wanted, counts, step):
        """Return the ids that get a row, ordered by key."""

        def claim(i):
            return self.waiting.get(i, [counts[i]])[0], self._draw(i, step) >> 33, splitmix64(i)

        best = sorted(wanted, key=claim)[max(0, len(wanted) - len(self.free)) :]
        return sorted(best, key=splitmix64)

    def _expire(self, step):
        ttl_steps = self.policy.ttl_steps
        if ttl_steps and step % max(1, ttl_steps // 8) == 0:
            self._leave([i for i in self.rows if self.rows[i][2] < step - ttl_steps])

    def _trim(self, step):
        if len(self.waiting) > self.capacity:
            old = sorted(
                (i for i in self.waiting if self.waiting[i][1] < step),
                key=lambda i: (self.waiting[i][1], splitmix64(i)),
            )
            for i in old[: len(self.waiting) - self.capacity + self.capacity // 8]:
                del self.waiting[i]

    def _worth(self, i):
        _, sightings, last = self.rows[i]
        return last if self.policy.eviction == "lru" else (sightings, last), splitmix64(i)

    def _leave(self, ids):
        for i in sorted(ids, key=splitmix64):
            self.free.append(self.rows.pop(i)[0])
            self.left.append(i)
