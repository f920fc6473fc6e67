"""Settings of searches in tests."""

from functools import partial

from raytrec.tuning.search import Settings

make_settings = partial(Settings, metric=None, seed=0, grace_steps=None, factor=4.0)
