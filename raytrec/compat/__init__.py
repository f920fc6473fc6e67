"""Code that uses private names of upstream packages, such as Ray and torch; no other package uses such names.

Each use was checked against the versions in versions.py; tests/compat/test_upstream_surface.py reports names
that a new version has changed. Each module covers one package, so that, for example, ray_core does not import torch.
A function that accesses a private name through versions.py raises a RunError if the installed version lacks the name;
its docstring does not repeat this error.
"""
