"""benchmarks/adapters_mixed.py, all but its graphs and times."""

import subprocess
import sys

import pytest

from tests.support.paths import BENCHMARKS, ROOT


@pytest.mark.slow
def test_dry_run():
    command = [sys.executable, str(BENCHMARKS / "adapters_mixed.py"), "--dry-run", "--M", "3"]
    answer = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert answer.returncode == 0, answer.stderr[-4000:]
    assert answer.stdout.splitlines()[-1].startswith("6 cells")
