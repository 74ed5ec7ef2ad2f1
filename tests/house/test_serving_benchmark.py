"""benchmarks/serving.py, all but its graphs, kernels and times."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import BENCHMARKS, ROOT

pytest.importorskip("transformers")


@pytest.mark.slow
def test_dry_run(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "serving.py"), "--dry-run", "--only", "moe_ops"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    answer = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert answer.returncode == 0, answer.stderr[-4000:]
    (file,) = Path(tmp_path).glob("serving_dry_run_*/serving_dry_run.json")
    rows = json.loads(file.read_text())["rows"]
    assert [row["requests"] for row in rows] == [3, 5]
    assert not any(row.get("reason") or row["failed"] for row in rows), rows
    assert all(row["tokens_s"] > 0 and row["decode"]["kernels"] > 0 for row in rows)
    assert (
        rows[0]["logprob_max"] < 1e-4
        and rows[0]["first_equal_tokens"] == [rows[0]["new_tokens"]] * 3
    )
