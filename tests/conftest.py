"""Flags, set before JAX and NumPy start, and the selection of cases that run by default.

8 CPU devices are for the sharding tests; no preallocation on a GPU; one thread for each worker's
NumPy."""

import importlib
import os
from pathlib import Path

os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8"]
).strip()
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import pytest

jax.config.update("jax_enable_x64", True)


def pytest_addoption(parser):
    parser.addoption(
        "--exhaustive",
        action="store_true",
        help="run every case of every test, not a cover of their parameters; compile as users do",
    )
    parser.addoption(
        "--thorough", action="store_true", help="run a cover of each test, not of each file"
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "every_row: the cover has every row of the table")
    config.addinivalue_line("markers", "only_exhaustive: no part of the cover")
    if not config.getoption("--exhaustive"):
        # Programs here are short and run once: compiling them is what takes the time.
        os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
        if jax.__version_info__ < (0, 11):  # which later ones do not know
            os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
        import hypothesis

        hypothesis.settings.register_profile("cover", max_examples=30)
        hypothesis.settings.load_profile("cover")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Without --exhaustive, leaves a cover of the cases (see selection.py)."""
    if config.getoption("--exhaustive"):
        return
    import selection  # which imports the library: not before the flags are set

    tests = {}
    for item in items:
        if item.get_closest_marker("only_exhaustive") is None:
            name = (str(item.path), item.nodeid.partition("[")[0])
            tests.setdefault(name, []).append(item)
    chosen = selection.cover(
        {name: [_params(item) for item in cases] for name, cases in tests.items()},
        every_row=[x for x in tests if tests[x][0].get_closest_marker("every_row") is not None],
        thorough=config.getoption("--thorough"),
    )
    kept = {tests[name][i].nodeid for name in tests for i in chosen[name]}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
    items[:] = [item for item in items if item.nodeid in kept]


def _params(item):
    return item.callspec.params if hasattr(item, "callspec") else {}


def _free_gib() -> float:
    """Memory of the default device that a test may use."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") / 2**30
    stats = device.memory_stats()
    return (stats["bytes_limit"] - stats["bytes_in_use"]) / 2**30


@pytest.fixture(autouse=True, scope="module")
def _forget_programs():
    """Compiled programs of one file are of no use to the next, and fill the memory."""
    yield
    jax.clear_caches()


@pytest.fixture
def needs_memory():
    """A function that skips a test unless the default device has so many GiB free."""

    def check(gib: float) -> None:
        free = _free_gib()
        if free < gib:
            pytest.skip(f"needs {gib} GiB of memory on the default device, {free:.1f} are free")

    return check


@pytest.fixture
def needs_gpu():
    """Skips a test unless the default device is a GPU."""
    if jax.default_backend() != "gpu":
        pytest.skip("needs a GPU")


@pytest.fixture
def benchmark_module(monkeypatch):
    """A function that imports a module of `benchmarks/`, which is not installed."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    return lambda name: importlib.import_module(f"benchmarks.{name}")


# Where these cannot run, something is wrong with the set-up: 8 CPU devices are everywhere.
_NEVER_SKIPPED = ("test_sharding.py", "test_multihost.py")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A skipped test of a file that must run is a failure."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and item.path.name in _NEVER_SKIPPED:
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} must not be skipped: {call.excinfo.value}"
    return report
