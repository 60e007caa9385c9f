"""One store of images for all tests here, which only `make test-image` runs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from image_kit import Containers


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.timeout(3600))
            if not os.environ.get("RL_IMAGE"):
                item.add_marker(
                    pytest.mark.skip(reason="builds and runs container images; make test-image")
                )


@pytest.fixture(scope="session")
def containers() -> Iterator[Containers]:
    """RL_IMAGE_STORE names a folder that is kept, with the layers for the next time."""
    kept = os.environ.get("RL_IMAGE_STORE")
    folder = Path(kept or tempfile.mkdtemp(prefix="rlearner-images-", dir="/var/tmp"))
    folder.mkdir(exist_ok=True)
    made = Containers(folder)
    try:
        yield made
    finally:
        made.close(keep=bool(kept))


@pytest.fixture(scope="session")
def base(containers: Containers) -> str:
    return containers.base()


@pytest.fixture(scope="session")
def hub(containers: Containers, base: str) -> str:
    return containers.build("hub", base)


@pytest.fixture(scope="session")
def cpu(containers: Containers, base: str) -> str:
    return containers.build("cpu", base)
