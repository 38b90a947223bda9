"""Shared by all tests: one thread, one cache of written data apart from the user's, and slow tests in CI only."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported. Tests run side by side, and bit-for-bit comparisons want one order of summation.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from helpers.s3_server import endpoint, impatient, own_bucket, proxy  # noqa: F401  # fixtures

from clipx.config import plugins

# Not ignored, as it is in what a shell runs in the background: the processes of tests would ignore it too.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # whose base is a folder of the session's
        root = root.parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLIPX_CACHE", str(root / "clipx-cache"))
        yield


@pytest.fixture(autouse=True)
def _own_plugins() -> Iterator[None]:
    """Folders of --config-dir that a test names are not those of the tests after it, nor of their processes."""
    yield
    plugins.__path__.clear()
    os.environ.pop("CLIPX_PLUGINS", None)


@pytest.fixture(scope="session")
def slurm_conf() -> Path:
    """The slurm.conf that CLIPX_TEST_SLURM names. No test starts that cluster: it takes root, packages, and /etc/hosts."""
    conf = os.environ.get("CLIPX_TEST_SLURM")
    if conf is None:
        without = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        without("CLIPX_TEST_SLURM names no SLURM cluster: tests/helpers/slurm_cluster.py says how to start one")
    return Path(conf)


@pytest.fixture
def slurm(slurm_conf: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cluster, which SLURM's commands use in this test."""
    monkeypatch.setenv("SLURM_CONF", str(slurm_conf))
    return slurm_conf


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leaves the modules of torch and the collected tests out of garbage collection, and collects less often.

    A full collection takes 0.3 s with them; composing configurations triggered many.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what needs SLURM. Leaves slow tests out unless CI=true, and them and the others by hand unless -m asks."""
    for item in items:
        if "slurm_conf" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slurm)
    if config.option.markexpr:
        return
    left_out = ("soak", "number") if os.environ.get("CI") == "true" else ("slow", "soak", "number")
    slow = [item for item in items if any(map(item.get_closest_marker, left_out))]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]
