"""Generate events in Yambda's layout, with planted preferences that drift by day.

A user's taste z and an artist's style v are Gaussian vectors. From day to day, z moves by
z' = RHO · z + sqrt(1 − RHO²) · noise. A listen is finished with probability sigmoid(BIAS + STRENGTH · z·w), where w
is the item's vector: mostly its artist's. Only recent events of a user therefore predict the next one.
Proportions are those of Yambda 50m: 93 items per user in 300 days, 15.5 listens a day, 7 items per artist, 3 per
album, 61 % finished listens, and likes after 3 % of them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from raytrec_datasets.yambda.events import TYPES

ITEMS_PER_USER_DAY, LISTENS_PER_DAY, ITEMS_PER_ARTIST, ITEMS_PER_ALBUM = 93 / 300, 15.5, 7, 3
LIKED, OTHER = 0.03, (0.003, 0.006, 0.001)  # likes per finished listen; dislikes, unlikes, undislikes per listen
STYLES, RHO, STRENGTH, BIAS = 4, 0.9, 1.0, 0.6
DAY_S, TRACK_S, STEP_S, UNSET = 86_400, 200, 5, -1


def write_source(folder: Path, size: str, users: int, days: int, seed: int) -> float:
    """Write flat/SIZE/multi_event.parquet and the mappings, and return the AUC of the true probabilities.

    The AUC is that of the last day's listens.
    """
    rng = np.random.default_rng(seed)
    items = max(ITEMS_PER_ARTIST, round(ITEMS_PER_USER_DAY * users * days))
    artist, album = (1 + rng.permutation(items) // per for per in (ITEMS_PER_ARTIST, ITEMS_PER_ALBUM))
    style = rng.normal(size=(artist.max() + 1, STYLES))[artist] + 0.5 * rng.normal(size=(items, STYLES))
    style /= np.sqrt(1.25)
    taste, activity = rng.normal(size=(users, STYLES)), rng.gamma(1.0, LISTENS_PER_DAY, users)
    parts = []
    for day in range(days):
        counts = rng.poisson(activity)
        user = np.repeat(np.arange(users), counts)
        item = np.minimum(np.exp(rng.random(len(user)) * np.log(items)).astype(np.int64) - 1, items - 1)
        logit = BIAS + STRENGTH * np.einsum("nd,nd->n", taste[user], style[item])
        p = 1 / (1 + np.exp(-logit))
        finished = rng.random(len(user)) < p
        session = np.sort(rng.integers(8, 23, (users, 3)), axis=1)[user, rng.integers(0, 3, len(user))]
        order = np.lexsort((session, user))
        user, item, p, finished, session = (x[order] for x in (user, item, p, finished, session))
        starts = np.flatnonzero(np.diff(user * 24 + session, prepend=-1))
        place = np.arange(len(user)) - np.repeat(starts, np.diff(starts, append=len(user)))
        time = np.minimum(day * DAY_S + session * 3600 + place * TRACK_S, (day + 1) * DAY_S - 2 * STEP_S)
        played = np.where(finished, rng.integers(50, 101, len(user)), rng.integers(0, 50, len(user)))
        organic = rng.random(len(user)) < 0.5
        listens = np.stack([user, time, item, organic, np.zeros_like(user), played])
        drawn = rng.random(len(user))
        chosen = [finished & (drawn < LIKED)]
        chosen += [(drawn >= low) & (drawn < low + share) for low, share in zip((0.1, 0.2, 0.3), OTHER, strict=True)]
        parts.append(listens)
        for kind, mask in enumerate(chosen, 1):
            others = listens[:, mask]
            parts.append(np.stack([*others[:1], others[1] + STEP_S, *others[2:4], np.full_like(others[0], kind)]))
            parts[-1] = np.vstack([parts[-1], np.full_like(others[:1], UNSET)])
        taste = RHO * taste + np.sqrt(1 - RHO**2) * rng.normal(size=taste.shape)
    events = np.concatenate(parts, axis=1)
    user, time, item, organic, kind, played = events[:, np.lexsort((events[4], events[1], events[0]))]
    is_listen = kind == 0
    (folder / "flat" / size).mkdir(parents=True)
    columns = {
        "uid": user.astype(np.uint32) + 1,
        "timestamp": time.astype(np.uint32),
        "item_id": item.astype(np.uint32) + 1,
        "is_organic": organic.astype(np.uint8),
        "played_ratio_pct": pa.array(np.where(is_listen, played, 0).astype(np.uint16), mask=~is_listen),
        "track_length_seconds": pa.array(np.full(len(kind), TRACK_S, np.uint32), mask=~is_listen),
        "event_type": pa.DictionaryArray.from_arrays(pa.array(kind.astype(np.int8)), pa.array(TYPES)),
    }
    pq.write_table(pa.table(columns), folder / "flat" / size / "multi_event.parquet", compression="zstd")
    keys = np.arange(1, items + 1, dtype=np.uint32)
    for name, values in (("artist", artist), ("album", album)):
        table = pa.table({f"{name}_id": values.astype(np.uint32), "item_id": keys})
        pq.write_table(table, folder / f"{name}_item_mapping.parquet", compression="zstd")
    return compute_auc(p, finished)


def compute_auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Return the area under the ROC curve of distinct scores, float [n], for labels, bool [n].

    Without positive or without negative labels, the result is 0.5.
    """
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores)] = np.arange(1, len(scores) + 1)
    positive = int(labels.sum())
    pairs = positive * (len(scores) - positive)
    return float((ranks[labels].sum() - positive * (positive + 1) / 2) / pairs) if pairs else 0.5
