"""benchmarks/dispatched_rows.py, all but its times."""

import subprocess
import sys

import pytest

from tests.support.paths import BENCHMARKS, ROOT


@pytest.mark.slow
def test_dry_run():
    pytest.importorskip("torchtitan")
    command = [sys.executable, str(BENCHMARKS / "dispatched_rows.py"), "--dry-run"]
    answer = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert answer.returncode == 0, answer.stderr[-4000:]
    assert answer.stdout.splitlines()[-1].endswith("dispatched_rows_cpu.json")
