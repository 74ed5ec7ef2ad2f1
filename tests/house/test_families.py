"""What is particular to a family of transformers' models stands in families.toml, and nowhere else
in the package.
"""

import re
import tomllib

import pytest

from tests.support.paths import ROOT

PACKAGE = ROOT / "moe_ops"
TABLE = PACKAGE / "integrations" / "transformers" / "families.toml"
# words that begin names of families, and stand elsewhere in their own sense
WORDS = {"aria", "beam", "diffusion", "dots", "flex", "flint", "lara", "muse", "openai", "solar"}
WORDS |= {"step", "switch", "unlimited"}
# where names of families are names of something else, or examples
ELSEWHERE = {
    "routing/methods.py": "methods of public names",
    "routing/route.py": "their formulas, and where they come from",
    "bench/__main__.py": "models that are timed",
    "bench/layers.py": "models that are timed",
    "bench/shapes.py": "models that are timed",
    "nn/config.py": "a method's public name",
    "nn/layer.py": "whose state dicts it takes",
    "nn/load.py": "a paper",
    "backends/flashinfer/binding.py": "names of its own",
    "backends/flashinfer/library.py": "names of its own",
    "backends/triton/products.py": "what was measured",
    "parallel/all2all.py": "the address of a library",
    "parallel/costs.py": "what was measured",
    "parallel/plan.py": "what was measured",
}


FAMILIES = tomllib.loads(TABLE.read_text())["families"]


def names() -> set[str]:
    """Of the families, as regular expressions: the whole ones, and the words they begin with."""
    words = {re.match("[a-z]+", name)[0] for name in FAMILIES}
    return {name.replace("_", "[-_. ]?") for name in {*FAMILIES, *words} - WORDS if len(name) > 3}


def named(text: str) -> set[str]:
    longest_first = "|".join(sorted(names(), key=len, reverse=True))
    return set(re.findall(rf"(?<![a-z])(?i:{longest_first})", text))


def test_no_other_file_names_a_family():
    found = {
        path.relative_to(PACKAGE).as_posix(): sorted(words)
        for path in PACKAGE.rglob("*.py")
        if (words := named(path.read_text()))
    }
    wrong = {file: words for file, words in found.items() if file not in ELSEWHERE}
    assert not wrong, f"move what is particular to a family into {TABLE.name}: {wrong}"
    assert found, "no name was found at all"


def test_the_document_says_which_routers_stay():
    text = (ROOT / "docs" / "transformers.md").read_text()
    left = re.search(r"Of families with\nrouters these are: (.*?)\n\n", text, re.S)[1]
    refused = [name for name, row in FAMILIES.items() if "not_covered" in row]
    assert [name for name in refused if name not in left] == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("if weight.dim() == 2:  # dbrx joins experts and rows", {"dbrx"}),
        ('_KIND = "Mxfp4GptOssExperts"', {"GptOss"}),
        ("as GPT-OSS does", {"GPT-OSS"}),
        ("def _llama4_block(block):", {"llama4"}),
        ("of DeepSeek and Qwen3-FP8", {"DeepSeek", "Qwen"}),
        ("not for beam search, step by step", set()),
        ("a mixture of experts", set()),
    ],
)
def test_names_are_found(text, wrong):
    assert named(text) == wrong
