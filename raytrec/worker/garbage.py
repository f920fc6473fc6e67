"""What Python's garbage collector looks at in a process that trains."""

from __future__ import annotations

import gc


def spare_what_stays() -> None:
    """Takes all that there is now, which a run needs to its end, out of what is looked through for garbage.

    A rank has half a million such objects: modules, the model, the plan. Python looks through the oldest ones
    only when a quarter as many have joined them, so that what an epoch leaves in cycles (Ray Data's executor,
    with its operators and statistics) was kept for some hundred epochs, and each look cost half a second of
    training.
    """
    import ray.data  # noqa: F401  (what the first epoch would import stays, too)

    gc.collect()
    gc.freeze()
    gc.collect()  # of what is left, next to nothing: from here on Python looks often
