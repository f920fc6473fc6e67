"""List of the packages of raytrec. Everything else is in pyproject.toml.

The recipes live in datasets/ but are imported as raytrec_datasets, because `datasets` is the import name of a
well-known library on PyPI.
"""

from setuptools import find_packages, setup

recipes = [f"raytrec_datasets.{name}" for name in find_packages("datasets")]
setup(packages=[*find_packages(include=["raytrec*"]), "raytrec_datasets", *recipes])
