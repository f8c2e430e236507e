"""Calls are captured into CUDA graphs (XLA's command buffers). Needs a GPU."""

import numpy as np


def test_calls_are_captured_and_results_are_the_same_bits(needs_gpu, benchmark_module, tmp_path):
    cuda_graphs = benchmark_module("cuda_graphs")
    on, off = (cuda_graphs.run(way, tmp_path) for way in ("on", "off"))
    assert on.captured
    assert not off.captured
    for name in cuda_graphs.PROGRAMS:
        assert np.isfinite(off.solutions[name]).all()
        np.testing.assert_array_equal(on.solutions[name], off.solutions[name])
