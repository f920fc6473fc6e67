"""All uses of private names of upstream libraries, such as Ray and torch, and nothing else.

Each use was checked against the versions in versions.py; tests/compat/test_upstream_surface.py reports names
that a new version has changed. Each module covers one library, so that, for example, ray_core does not import torch.
"""
