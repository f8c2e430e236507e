"""What the documentation site has beside docs/: pages of the repository, and examples that ran.

Documents link to one another by their places in the repository, so that links work on a code host.
In the site, what is outside docs/ is below `repository/`, and a program of examples/ is a page.
"""

from __future__ import annotations

import ast
import os
import posixpath
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
INIT = ROOT / "jax_batched/__init__.py"
LINK = re.compile(r"(?<=\]\()[^)\s#:]+(?=[)#])")
SECONDS = 30  # of an example without a row in mkdocs.yml
PROGRAMS = sorted(ROOT.glob("examples/[!_]*.py"))
IMPORTS = re.findall(r"^from (jax_batched\S*) import ([\w, ]+)", INIT.read_text(), re.M)
PUBLIC = {n.strip(): f"{module}.{n.strip()}" for module, names in IMPORTS for n in names.split(",")}

documents: dict[str, Path] = {}  # by their places in the sources of the site
runs = os.environ.get("JAX_BATCHED_SITE_RUNS") != "0"


def on_startup(command: str, **_: Any) -> None:
    """`mkdocs serve` builds at every change, so without runs."""
    global runs
    runs = runs and command != "serve"


def on_config(config: MkDocsConfig) -> None:
    """The examples of the navigation."""
    for section in config.nav or []:
        if "Examples" in section:
            section["Examples"] = ["examples/index.md", *map(site_path, PROGRAMS)]


def site_path(file: Path) -> str:
    """Where a file of the repository is in the sources of the site."""
    path = file.relative_to(ROOT).as_posix()
    if path in ("README.md", "examples"):
        return posixpath.join(path.removesuffix("README.md"), "index.md")
    if file in PROGRAMS:
        return path.removesuffix("py") + "md"
    if file.is_dir() or file.name == "README.md":
        path = path.removesuffix("/README.md") + ".md"
    return path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}"


def leads_to(file: Path) -> Iterator[Path]:
    """The files and folders that a document links to; the pictures of a folder."""
    if file.is_dir():
        yield from file.glob("*.png")
    elif file.suffix == ".md":
        targets = (file.parent / target for target in LINK.findall(file.read_text()))
        yield from (target.resolve() for target in targets if target.exists())


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Adds what is linked and not in docs/, and the examples."""
    todo = [ROOT / "docs" / page.src_uri for page in files.documentation_pages()]
    seen = {ROOT / "README.md", *todo}
    while todo:
        file = todo.pop()
        documents[site_path(file)] = file
        if site_path(file).startswith("repository/"):
            add(files, config, site_path(file), **contents(file))
        todo += set(leads_to(file)) - seen
        seen.update(todo)
    rows = ["# Examples", "", "| program | what it does |", "|---|---|"]
    for program in PROGRAMS:
        text = ast.get_docstring(ast.parse(program.read_text())) or ""
        title, _, about = text.partition("\n")
        rows.append(f"| [{name_of(program)}]({program.stem}.md) | {title} |")
        page = [f"---\ntitle: {name_of(program)}\n---", f"# {title.rstrip('.')}", about.strip()]
        page += [*run(program, files, config), "## The program", code(body(program), "python")]
        add(files, config, site_path(program), content="\n\n".join(page))
    add(files, config, "examples/index.md", content="\n".join(rows))


def add(files: Files, config: MkDocsConfig, path: str, **source: Any) -> None:
    """Adds a file to the sources of the site."""
    files.append(File.generated(config, path, **source))


def contents(file: Path) -> dict[str, str]:
    """What the site shows of a file; of a folder, its pictures."""
    if not file.is_dir():
        return {"abs_src_path": str(file)}
    pictures = sorted(file.glob("*.png"))
    lines = [f"## {p.stem}\n\n![{p.stem}]({file.name}/{p.name})" for p in pictures]
    return {"content": "\n\n".join([f"# Pictures of {file.relative_to(ROOT)}", *lines])}


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links to the repository's files become links to those of the site."""
    place = page.file.src_uri
    if place not in documents:
        return markdown
    document = documents[place]

    def moved(link: re.Match[str]) -> str:
        file = (document.parent / link[0]).resolve()
        known = file.exists() and file.is_relative_to(ROOT)
        return posixpath.relpath(site_path(file), posixpath.dirname(place)) if known else link[0]

    markdown = re.sub(r"^<!-- (begin|end) \w+ -->$", "", markdown, flags=re.M)
    # What is in a list is indented by two or three columns on code hosts, here by four.
    markdown = re.sub(r"^```.*?^```|^ {2,3}(?=\S)", indented, markdown, flags=re.M | re.S)
    return LINK.sub(moved, markdown)


def indented(match: re.Match[str]) -> str:
    """Four columns; code stays."""
    return match[0] if match[0].strip() else "    "


def on_page_content(html: str, page: Page, **_: Any) -> str:
    """In the reference, names of public functions are links to them."""
    if not page.file.src_uri.startswith("reference/"):
        return html

    def reference(match: re.Match[str]) -> str:
        return f'<autoref identifier="{PUBLIC[match[1]]}" optional>{match[0]}</autoref>'

    return re.sub(rf"<code>({'|'.join(PUBLIC)})</code>", reference, html)


def name_of(program: Path) -> str:
    """A program in the navigation."""
    return program.stem.replace("_", " ").capitalize()


def body(program: Path) -> str:
    """A program without the docstring that is shown above it."""
    source = program.read_text()
    return "\n".join(source.splitlines()[ast.parse(source).body[0].end_lineno :]).strip()


def code(text: str, language: str) -> str:
    """A block of code."""
    return f"````{language}\n{text}\n````"


def run(program: Path, files: Files, config: MkDocsConfig) -> list[str]:
    """What a run of an example printed and drew, as it is when the site is built."""
    settings = config.extra["examples"]
    named = program.stem in settings
    arguments = settings.get(program.stem, [])
    if not runs or arguments is None:
        return ["This page shows the program without a run."]
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder) / f"{program.stem}.png"
        command = [program.name, *arguments, "--output", picture.name]
        try:
            result = subprocess.run(
                [sys.executable, program, *command[1:]],
                cwd=folder,
                env={**os.environ, "COLUMNS": "100"},
                capture_output=True,
                text=True,
                timeout=None if named else SECONDS,
            )
        except subprocess.TimeoutExpired:
            return [f"It takes more than {SECONDS} seconds, so this page shows it without a run."]
        if result.returncode:
            raise PluginError(f"{program.name}: {result.stderr}")
        page = ["## A run", "When this site was built, on the machine that built it:"]
        page += [code(f"$ python examples/{' '.join(command)}", "console")]
        page += [code(result.stdout.rstrip(), "text")]
        if picture.exists():
            add(files, config, f"examples/{picture.name}", content=picture.read_bytes())
            page += [f"![The picture that it draws]({picture.name})"]
    return page
