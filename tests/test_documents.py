"""The Markdown documents: links, commands, code, tables from results files, length of sentences."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import jax_batched as jb

ROOT = Path(__file__).parents[1]
USERS = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
INTERNALS = sorted((ROOT / "docs" / "internals").glob("*.md"))
USERS += sorted(set((ROOT / "docs").rglob("*.md")) - set(INTERNALS))
DOCUMENTS = [*USERS, *INTERNALS]
DOCUMENTS += [ROOT / "benchmarks" / "README.md", ROOT / "tests" / "exported" / "README.md"]
# Pages whose code is to be run.
PROGRAMS = [path for path in USERS if path.parent.name == "how_to" or path.stem == "first_steps"]
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
OTHER_SECTIONS = {"override", "override_cpu", "graphs", "sweep", "errors", "real"}
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


def run_code(document: Path) -> dict:
    """The names that a page's blocks of Python define, one after the other."""
    names = {}
    for block in re.findall(r"^```python\n(.*?)^```", document.read_text(), re.DOTALL | re.M):
        exec(block.replace("100_000", "10"), names)
    return names


def test_the_code_of_the_readme_runs():
    assert "100_000" in README
    assert run_code(ROOT / "README.md")["info"].converged.all()


@pytest.mark.parametrize("document", PROGRAMS, ids=path_id)
def test_the_code_of_pages_runs(document):
    run_code(document)


def test_every_function_has_a_reference():
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    documented = re.findall(r"^::: jax_batched.*\.(\w+)$", pages, re.M)
    assert sorted(documented) == sorted(set(documented))
    assert set(jb.__all__) - set(documented) == {"__version__"}


def test_tests_that_a_page_names_are_there():
    page = (ROOT / "docs" / "known_wrong_answers.md").read_text()
    for file, test in re.findall(r"`(test_\w+\.py)::(\w+)`", page):
        assert f"def {test}(" in (ROOT / "tests" / file).read_text(), test


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
