"""What pyproject.toml asks of a build: which jaxlib it takes the header of the FFI from."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

PYPROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())

# The oldest jaxlib, from 0.10.2 on, that has a wheel for a Python.
OLDEST = {
    "3.11": "0.10.2",
    "3.12": "0.10.2",
    "3.13": "0.10.2",
    "3.14": "0.10.2",
    "3.15": "0.11.1",
}


def jaxlib_of_the_build(python: str) -> SpecifierSet:
    """Versions of jaxlib that a build with this Python may take."""
    requirements = map(Requirement, PYPROJECT["build-system"]["requires"])
    (jaxlib,) = (
        requirement
        for requirement in requirements
        if requirement.name == "jaxlib"
        and (requirement.marker is None or requirement.marker.evaluate({"python_version": python}))
    )
    return jaxlib.specifier


@pytest.mark.parametrize("python", OLDEST)
def test_the_header_is_the_oldest_jaxlibs(python):
    assert jaxlib_of_the_build(python) == SpecifierSet(f"=={OLDEST[python]}")


def test_the_oldest_jaxlib_is_the_oldest_supported():
    (jax,) = (r for r in map(Requirement, PYPROJECT["project"]["dependencies"]) if r.name == "jax")
    assert jax.specifier == SpecifierSet(f">={OLDEST['3.11']}")


def test_pythons_to_come_find_a_header():
    assert jaxlib_of_the_build("3.16").contains("1.0")


@pytest.mark.parametrize("python", [*OLDEST, "3.16"])
def test_a_wheel_is_for_pythons_whose_jaxlibs_read_its_header(python):
    """A wheel of the stable ABI installs on later Pythons and, from 3.12 on, on older ones."""
    settings = PYPROJECT["tool"]["scikit-build"]
    abi = settings["wheel"]["py-api"]
    for override in settings["overrides"]:
        if python in SpecifierSet(override["if"].get("python-version", "<0")):
            abi = override["wheel"]["py-api"]
    header_is_the_oldest = jaxlib_of_the_build(python).contains(OLDEST["3.11"])
    assert bool(re.fullmatch(r"cp3\d+", abi)) == header_is_the_oldest
