"""Test-wide settings: on a machine without a GPU every Triton kernel runs under its interpreter.

Three tiers. A test without a mark runs in `make check` and takes about a second at most. `slow`
are those that take longer, and every case of a sweep but the first. In the folders of `SWEEPS`
each parametrized function is one, and of those in `EVERY_SCHEME` also the first of each scheme on
each backend runs; elsewhere the mark `sweep` says so. `gpu` need a CUDA device.

`make test-all` runs them all. `make test` runs a twentieth of the cases that sweeps have beside
their first, by `--part`, which follows the day: twenty days run every case. It begins with slow
tests.
"""

from __future__ import annotations

import gc
import importlib
import os
import resource
import zlib
from collections.abc import Generator
from pathlib import Path

# processor time is what MOST_SECONDS limits, and threads that wait for others take it
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from torch.utils._device import _device_constructors

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported anywhere
    from tests.support.interpreter import (
        drop_unread_checks,
        multiply_rows_alike,
        patch_language_once,
        remember_types,
    )

    patch_language_once()
    drop_unread_checks()
    multiply_rows_alike()
    remember_types()

# torch remembers at its first use which functions `with torch.device(...)` changes. Were that
# while a test has torch.empty patched, the real one would make tensors elsewhere from then on.
_device_constructors()

# Tracing and interpreting make objects by the million, few of them in cycles: look for these less
# often.
gc.set_threshold(50_000, 20, 100)

# modules that register backends of other packages, which the matrix then runs like our own
for name in filter(None, os.environ.get("MOE_OPS_TEST_BACKENDS", "").split(",")):
    importlib.import_module(name)

HERE = Path(__file__).parent
# folders whose tests run over many cases that differ in sizes and options alone
SWEEPS = ("autograd", "backends", "kernels", "matrix", "numerics")
EVERY_SCHEME = Path("matrix/test_values.py")
PARTS = 20  # of the cases of sweeps
# Of processor time, which a busy machine disturbs little. What a test imports first counts, too.
MOST_SECONDS = 8.0


def scheme_and_backend(item: pytest.Function) -> tuple[object, ...]:
    params = item.callspec.params
    where = params.get("where")
    backend = where[0] if isinstance(where, tuple) else params.get("backend")
    return params.get("scheme"), backend


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part",
        type=int,
        choices=range(PARTS),
        help=f"of the cases of sweeps beside their first run one of {PARTS} parts",
    )
    parser.addoption(
        "--failures-at-once",
        action="store_true",
        help="print what failed at once, so that a run that is cut short still says it",
    )


class FailuresAtOnce:
    """Prints what failed when it has failed."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            text = report.longreprtext[-3000:]
            print(f"\nFAILED {report.nodeid} ({report.when})\n{text}", flush=True)


def pytest_configure(config: pytest.Config) -> None:
    # workers of pytest-xdist report to the process that started them
    if config.getoption("failures_at_once") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailuresAtOnce())


def pytest_report_header(config: pytest.Config) -> str | None:
    part = config.getoption("part")
    return None if part is None else f"sweeps: --part {part} of their cases"


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seen: set[tuple[object, ...]] = set()
    others = set()  # not of this part
    for item in items:
        if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
            continue
        if item.get_closest_marker("gpu"):
            continue
        keys = {(item.path, item.originalname)}
        path = item.path.relative_to(HERE)
        if path == EVERY_SCHEME:
            keys.add(scheme_and_backend(item))
        elif path.parts[0] not in SWEEPS and not item.get_closest_marker("sweep"):
            continue
        if keys <= seen:
            item.add_marker("slow")
            # not by their order, in which each part may have the same value of a parameter
            if zlib.crc32(item.nodeid.encode()) % PARTS != config.getoption("part"):
                others.add(item)
        seen |= keys
    if config.getoption("part") is not None:
        config.hook.pytest_deselected(items=list(others))
        items[:] = [item for item in items if item not in others]
        # the longest first, so that no process has one left when the others are done
        items.sort(key=lambda item: hasattr(item, "callspec") or "slow" not in item.keywords)


def processor_seconds() -> float:
    """Of this process and of those that it started and waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    before = processor_seconds()
    result = yield
    seconds = processor_seconds() - before
    if seconds > MOST_SECONDS and not any(map(item.get_closest_marker, ("slow", "gpu"))):
        pytest.fail(f"took {seconds:.1f} s of processor time: make it smaller or mark it `slow`")
    return result
