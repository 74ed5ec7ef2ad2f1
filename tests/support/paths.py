"""Where the repository lies: documents, examples and benchmarks that tests read or run."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
EXAMPLES = ROOT / "examples"
SUPPORT = ROOT / "tests" / "support"
