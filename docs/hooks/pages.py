"""Hook of mkdocs: the site's pages are the repository's documents, at the repository's own paths.

Documents, images and results lie where they belong, not all of them in docs/. The site keeps their
paths, so that a relative link works on the code host and on the site alike. Two kinds of link lead
to a page that only the site has: a link to an example to a page that shows its source, a link to
a folder to the first page of that folder.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tables
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import moe_ops

ROOT = Path(__file__).resolve().parents[2]
# what is shown as it is
DOCUMENTS = (
    *("*.md", "docs/**/*.md", "docs/**/*.png", "docs/hooks/*.css"),
    *("examples/**/*.md", "examples/**/*.png"),
    *("benchmarks/results/*.png", "benchmarks/results/*.json"),
)
# Zipf plots are drawn where somebody measures, and git ignores them
IGNORED = "benchmarks/results/*_zipf.png"
FIRST_PAGES = ("README.md", "index.md")
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replace the folders in `nav` by their pages, and say in the header of which version."""
    config.site_name = f"{config.site_name} {moe_ops.__version__}"
    known = [path for path, _ in _pages()]
    config.nav = [_expanded(entry, known) for entry in config.nav or []]
    config.watch += [str(ROOT / folder) for folder in ("docs", "examples", "moe_ops")]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Take away what mkdocs found in docs/ and put the repository's pages in place of it."""
    for file in list(files):
        if file.src_dir == config.docs_dir:
            files.remove(file)
    for path, content in _pages():
        if content is None:
            file = File.generated(config, path, abs_src_path=str(ROOT / path))
        else:
            file = File.generated(config, path, content=content)
        files.append(file)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to examples and folders to their pages."""
    folder = posixpath.dirname(page.file.src_uri)

    def replaced(found: re.Match[str]) -> str:
        before, target, after = found.groups()
        path = posixpath.normpath(posixpath.join(folder, target))
        candidates = [posixpath.join(path, name) for name in FIRST_PAGES]
        if path.endswith(".py"):
            candidates = [path.removesuffix(".py") + ".md"]
        for candidate in candidates:
            if files.get_file_from_path(candidate):
                return before + posixpath.relpath(candidate, folder or ".") + after
        return found.group()

    return LINK.sub(replaced, markdown)


def _pages() -> Iterator[tuple[str, str | None]]:
    """(path, text) of every page and image; text is None where the file is shown as it is."""
    ignored = set(ROOT.glob(IGNORED))
    for pattern in DOCUMENTS:
        for path in sorted(ROOT.glob(pattern)):
            if path not in ignored:
                yield path.relative_to(ROOT).as_posix(), None
    for path in sorted((ROOT / "examples").rglob("*.py")):
        yield path.relative_to(ROOT).with_suffix(".md").as_posix(), _example(path)
    yield "benchmarks/results/index.md", _results()
    yield from tables.pages()


def _expanded(entry: Any, known: list[str]) -> Any:
    if isinstance(entry, dict):
        return {title: _expanded(value, known) for title, value in entry.items()}
    if isinstance(entry, list):
        return [_expanded(value, known) for value in entry]
    if not entry.endswith("/"):
        return entry
    pages = [p for p in known if p.startswith(entry) and p.endswith(".md")]
    # the first page of each folder comes first
    return sorted(pages, key=lambda p: (p.count("/"), not p.endswith(FIRST_PAGES), p))


def _example(path: Path) -> str:
    """An example's page: its docstring's first line, and its source."""
    source = path.read_text()
    summary = (ast.get_docstring(ast.parse(source)) or "").split("\n\n")[0]
    return f"# {path.relative_to(ROOT / 'examples')}\n\n{summary}\n\n```python\n{source}```\n"


def _results() -> str:
    """The page of the folder of measured results."""
    lines = ["# Measured results", ""]
    lines += [
        "What the benchmarks wrote; [performance.md](../../docs/performance.md) says how.",
        "",
    ]
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        lines.append(f"- [{path.name}]({path.name})")
    return "\n".join(lines) + "\n"
