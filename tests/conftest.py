"""Fixtures and collection rules of all tests: one thread, a cache separate from the user's, slow tests only in CI."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import re
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

# Set before torch is imported: tests run in parallel, and bit-for-bit comparisons need one order of summation.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from helpers.browser import browser  # noqa: F401  # fixture
from helpers.hub_server import hub  # noqa: F401  # fixture
from helpers.s3_server import endpoint, impatient, own_bucket, proxy  # noqa: F401  # fixtures
from hydra.core.config_store import ConfigStore
from hypothesis import HealthCheck, settings
from omegaconf import OmegaConf

from clipx.config import plugins

if TYPE_CHECKING:
    from helpers.inputs import Inputs
    from helpers.ranks import Ranks

_Report = TypeVar("_Report", pytest.TestReport, pytest.CollectReport)

# Properties of the same code are tried with the same examples, however busy the machine is.
settings.register_profile(
    "default",
    max_examples=25,
    derandomize=True,
    database=None,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("ci", settings.get_profile("default"), max_examples=100)
settings.load_profile("ci" if os.environ.get("CI") == "true" else "default")

# A shell ignores SIGINT in background jobs, and the processes of tests would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", type=Path, metavar="FILE", help="measure each test, and write sums by file")


def pytest_configure(config: pytest.Config) -> None:
    """Hides CUDA devices from all tests but those of `-m gpu`.

    Ranks of a test would share a device, results would depend on it, and workers of xdist would fill its memory.
    """
    if "gpu" not in config.option.markexpr or config.option.markexpr.startswith("not "):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    else:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # needed by deterministic runs before CUDA starts
    if hasattr(config, "workerinput") or not config.option.numprocesses:  # else the workers have yet to read it
        os.environ.pop("PYTEST_ADDOPTS", None)  # not for tests that run pytest themselves
    if config.option.costs:
        from helpers.costs import Costs

        config.pluginmanager.register(Costs(config.option.costs, is_worker=hasattr(config, "workerinput")))


@pytest.fixture(scope="session", autouse=True)
def _separate_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # its base is a subfolder of the session's
        root = root.parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLIPX_CACHE", str(root / "clipx-cache"))
        patch.setenv("TRACKIO_DIR", str(tmp_path_factory.mktemp("trackio")))  # read once, when trackio is imported
        yield


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two ranks for all tests of this process. The first call starts them."""
    from helpers.ranks import Ranks

    with contextlib.closing(Ranks(2, tmp_path_factory.mktemp("ranks"))) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """Runs, weights and data by name. The first use of a name makes it."""
    from helpers.inputs import Inputs

    return Inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(autouse=True)
def _clean_plugins() -> Iterator[None]:
    """Removes the --config-dir folders of a test and their options, which later tests must not see."""
    yield
    if plugins.__path__:
        for name in [name for name in sys.modules if name.startswith(f"{plugins.__name__}.")]:
            del sys.modules[name]
        for group in ConfigStore.instance().repo["schema"].values():
            for file in list(group) if isinstance(group, dict) else []:
                if OmegaConf.get_type(group[file].node).__module__.startswith(f"{plugins.__name__}."):
                    del group[file]
    plugins.__path__.clear()
    os.environ.pop("CLIPX_PLUGINS", None)


@pytest.fixture(scope="session")
def slurm_conf() -> Path:
    """Returns the slurm.conf in CLIPX_TEST_SLURM.

    No test starts that cluster: it needs root, packages and /etc/hosts.
    """
    conf = os.environ.get("CLIPX_TEST_SLURM")
    if conf is None:
        without = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        without("CLIPX_TEST_SLURM names no SLURM cluster: tests/helpers/slurm_cluster.py starts one")
    return Path(conf)


@pytest.fixture
def slurm(slurm_conf: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Points SLURM's commands to the test cluster. Returns its slurm.conf."""
    monkeypatch.setenv("SLURM_CONF", str(slurm_conf))
    return slurm_conf


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _without_silent_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _without_silent_skip((yield))


def _without_silent_skip(report: _Report) -> _Report:
    """Fails what is skipped for another reason than a device or SLURM, which nobody would notice."""
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        if not re.search(r"CUDA device|accelerator|on the CPU|SLURM", reason):
            report.outcome = "failed"
            report.longrepr = f"{reason}: tests are skipped only for a device or SLURM, so provide what is missing"
    return report


def pytest_collection_finish(session: pytest.Session) -> None:
    """Excludes the modules of torch and the collected tests from garbage collection, and collects less often.

    A full collection takes 0.3 s with them, and composing configurations triggered many.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_unconfigure(config: pytest.Config) -> None:
    gc.unfreeze()  # else nanobind reports frozen objects as leaks when the process ends


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    """Marks tests by what they need, and begins with the long ones, those on SLURM among them.

    Without -m, deselects soak and number tests, and slow tests unless CI=true.
    """
    for item in items:
        if "slurm_conf" in getattr(item, "fixturenames", ()):
            item.add_marker("slurm")
    yield  # -m deselects, and randomly shuffles
    if not config.option.markexpr:
        left_out = ("soak", "number") if os.environ.get("CI") == "true" else ("slow", "soak", "number")
        slow = {item for item in items if any(map(item.get_closest_marker, left_out))}
        config.hook.pytest_deselected(items=[*slow])
        items[:] = [item for item in items if item not in slow]
    long = [item for marker in ("long", "slurm") for item in items if item.get_closest_marker(marker)]
    items[:] = _begin_with(long, items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def _begin_with(long: list[pytest.Item], items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Returns the tests in an order in which each worker's share, of consecutive tests, begins with long ones.

    Else one worker would still run them when the others have nothing to take from it.
    """
    others = iter([item for item in items if item not in long])
    ordered: list[pytest.Item] = []
    for worker in range(workers):
        share = (len(items) - len(ordered)) // (workers - worker)  # as xdist's worksteal divides them
        own = long[worker::workers]
        ordered += [*own, *itertools.islice(others, max(0, share - len(own)))]
    return [*ordered, *others]
