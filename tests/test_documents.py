"""The Markdown documents: links, commands, code, tables from results files, length of sentences."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
USERS = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
USERS += sorted((ROOT / "docs").glob("*.md"))
DOCUMENTS = [*USERS, *sorted((ROOT / "docs" / "internals").glob("*.md"))]
DOCUMENTS += [ROOT / "benchmarks" / "README.md", ROOT / "tests" / "exported" / "README.md"]
README = (ROOT / "README.md").read_text()

# Which results file fills the sections of benchmarks.report in a document.
RESULTS = {
    "README.md": "nvidia-h200",
    "docs/performance.md": "nvidia-h200",
    "docs/refinement.md": "nvidia-h200",
    "docs/internals/measurements.md": "nvidia-h200",
    "docs/internals/measurements_cpu.md": "amd-epyc-2-cores",
}
# The sections of other programs: benchmarks.override, cuda_graphs and refinement.
OTHER_SECTIONS = {"override", "graphs", "sweep", "errors", "real"}
MOST_WORDS = 25


def path_id(document: Path) -> str:
    return str(document.relative_to(ROOT))


def prose(text: str) -> str:
    """A document without code."""
    text = re.sub(r"^(?:```.*?^```|    .*?)$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`]*`", "X", text)


def anchors(document: Path) -> set[str]:
    """The names of a document's headings in links, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=path_id)
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(document.read_text())):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def test_the_readme_has_two_commands():
    example, tests = re.findall(r"^```(?:bash|sh)\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    (program,) = re.findall(r"\S+\.py", example)
    assert (ROOT / program).exists()
    assert "pytest" in tests


def test_the_code_of_the_readme_runs():
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    assert "100_000" in blocks[0]
    names = {}
    for block in blocks:
        exec(block.replace("100_000", "10"), names)
    assert names["info"].converged.all()


def sections(document: Path) -> list[str]:
    return re.findall(r"^<!-- begin (\w+) -->$", document.read_text(), re.MULTILINE)


def test_sections_and_their_writers(benchmark_module):
    report = benchmark_module("report")
    for document in DOCUMENTS:
        ends = re.findall(r"^<!-- end (\w+) -->$", document.read_text(), re.MULTILINE)
        assert sections(document) == ends
        ours = path_id(document) in RESULTS
        assert ours == any(name in report.SECTIONS for name in sections(document)), document
    found = {name for document in DOCUMENTS for name in sections(document)}
    assert found == report.SECTIONS.keys() | OTHER_SECTIONS


@pytest.mark.parametrize("name", RESULTS)
def test_tables_show_the_results(benchmark_module, monkeypatch, name):
    report = benchmark_module("report")
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *_, **__: None)
    written = []
    monkeypatch.setattr(Path, "write_text", lambda _, text: written.append(text))
    report.fill(ROOT / name, ROOT / "benchmarks" / "results" / f"{RESULTS[name]}.jsonl")
    assert written == [(ROOT / name).read_text()]


def sentences(text: str) -> Iterator[str]:
    """The sentences of paragraphs and lists; a colon ends one where a capital follows."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", prose(text))
    text = re.sub(r"^\s*(?:\||#|!|<!--).*$", "", text, flags=re.MULTILINE)
    for paragraph in re.split(r"\n\s*\n|^\s*(?:[-*]|\d+\.) ", text, flags=re.MULTILINE):
        yield from re.split(r"(?<=[.!?:])\s+(?=[A-Z(\"])", paragraph)


@pytest.mark.parametrize("document", USERS, ids=path_id)
def test_sentences_are_short(document):
    for sentence in sentences(document.read_text()):
        words = re.findall(r"[^\W\d_][\w'’-]*", sentence)
        assert len(words) <= MOST_WORDS, " ".join(sentence.split())
