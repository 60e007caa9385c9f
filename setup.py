"""Names the packages to build: those that are found here, and ``configs`` as ``rlearner.configs``.

``pyproject.toml`` has all else. It can name the folder of a package, but cannot add a package to
those that setuptools finds.
"""

from setuptools import find_namespace_packages, setup

PATTERNS = ("broker*", "envhub*", "learner*", "rewardhub*", "rlearner*", "rollout*")

configs = [f"rlearner.{name}" for name in find_namespace_packages(include=("configs*",))]
setup(packages=[*find_namespace_packages(include=PATTERNS), *configs])
