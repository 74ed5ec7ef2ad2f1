"""Where the repository lies: documents, examples, benchmarks and tools that tests read or run."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
TOOLS = ROOT / "tools"
EXAMPLES = ROOT / "examples"
SUPPORT = ROOT / "tests" / "support"
