"""Calls are captured into CUDA graphs (XLA's command buffers). Needs a GPU."""

import importlib
from pathlib import Path

import jax
import numpy as np
import pytest


@pytest.fixture
def cuda_graphs(monkeypatch):
    if jax.default_backend() != "gpu":
        pytest.skip("needs a GPU")
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    return importlib.import_module("benchmarks.cuda_graphs")


def test_calls_are_captured_and_results_are_the_same_bits(cuda_graphs, tmp_path):
    on, off = (cuda_graphs.run(way, tmp_path) for way in ("on", "off"))
    assert on.captured
    assert not off.captured
    for name in cuda_graphs.PROGRAMS:
        assert np.isfinite(off.solutions[name]).all()
        np.testing.assert_array_equal(on.solutions[name], off.solutions[name])
