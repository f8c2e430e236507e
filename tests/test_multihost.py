"""The example of several hosts, as two processes of this machine that talk over loopback."""

import importlib.util
import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

PATH = Path(__file__).parents[1] / "examples" / "multihost.py"
STATIONS = 64
PENALTY = 1e-2


def environment(devices):
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run(folder, processes, devices):
    """What each process printed and wrote."""
    address = f"127.0.0.1:{free_port()}"
    # A file, not a pipe: a process that waits for its reader would keep the others waiting.
    logs = [(folder / f"{i}.log").open("w+") for i in range(processes)]
    started = []
    for i, log in enumerate(logs):
        arguments = ["--processes", str(processes), "--stations", str(STATIONS)]
        arguments += ["--output", str(folder / f"{i}.npz")]
        if processes > 1:
            arguments += ["--coordinator", address, "--process", str(i)]
        started.append(
            subprocess.Popen(
                [sys.executable, str(PATH), *arguments],
                env=environment(devices),
                cwd=tempfile.gettempdir(),
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        )
    try:
        codes = [process.wait(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
    texts = []
    for log in logs:
        log.seek(0)
        texts.append(log.read())
        log.close()
    assert codes == [0] * processes, "\n".join(texts)
    return texts, [np.load(folder / f"{i}.npz") for i in range(processes)]


def expected():
    """The coefficients of every station, by NumPy in float64."""
    spec = importlib.util.spec_from_file_location("multihost", PATH)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    solutions = []
    for station in range(STATIONS):
        x, y = (array.astype(np.float64) for array in example.observations(station))
        solutions.append(np.linalg.solve(x.T @ x + PENALTY * np.eye(x.shape[1]), x.T @ y))
    return np.stack(solutions)


@pytest.fixture(scope="module")
def solutions():
    return expected()


def test_two_processes_each_solve_their_own_stations(tmp_path, solutions):
    texts, outputs = run(tmp_path, processes=2, devices=2)
    for i, (text, output) in enumerate(zip(texts, outputs, strict=True)):
        assert f"process {i} of 2: 32 of 64 stations on 2 of 4 devices" in text
        assert output["first"] == 32 * i
        assert output["coefficients"].shape == (32, 6)
        np.testing.assert_allclose(
            output["coefficients"], solutions[32 * i : 32 * (i + 1)], rtol=1e-3, atol=1e-3
        )
    means = [re.search(r"mean residual of all stations: (\S+)", text)[1] for text in texts]
    assert means[0] == means[1]


def test_one_process_gives_the_same_as_two(tmp_path, solutions):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    _, (alone,) = run(tmp_path / "one", processes=1, devices=1)
    _, outputs = run(tmp_path / "two", processes=2, devices=1)
    np.testing.assert_allclose(alone["coefficients"], solutions, rtol=1e-3, atol=1e-3)
    together = np.concatenate([output["coefficients"] for output in outputs])
    np.testing.assert_allclose(together, alone["coefficients"], rtol=1e-5)
    assert outputs[0]["mean"] == outputs[1]["mean"] == pytest.approx(alone["mean"], rel=1e-6)
