"""The documents' links and pictures are there in a clone."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_links_lead_to_files_of_the_repository():
    git = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if git.returncode:
        pytest.skip("not a clone")
    files = [Path(name) for name in git.stdout.splitlines()]
    there = {*files, *(folder for file in files for folder in file.parents)}
    documents = [file for file in files if file.suffix == ".md" and (ROOT / file).exists()]
    links = [
        (document, link)
        for document in documents
        for link in re.findall(r"\]\(([^)#\s]+)", (ROOT / document).read_text())
        if "://" not in link
    ]
    assert len(links) > 10
    missing = [
        f"{document}: {link}"
        for document, link in links
        if Path(os.path.normpath(document.parent / link)) not in there
    ]
    assert not missing
