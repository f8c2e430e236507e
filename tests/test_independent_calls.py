"""Programs whose calls do not depend on each other end.

jaxlib 0.10's LAPACK calls can wait for each other for ever (docs/compatibility.md).
"""

import os
import subprocess
import sys
from pathlib import Path

import ops
import pytest

ROWS = [*ops.ONE_EACH, *ops.of("solve_gen"), *ops.COMPOSITE[:1], *ops.COMPOSITE[-1:]]


@pytest.mark.parametrize("op", ROWS, ids=ops.ids)
def test_independent_calls_end(op):
    script = Path(__file__).with_name("independent_calls.py")
    flags = os.environ["XLA_FLAGS"].replace("--xla_force_host_platform_device_count=8", "")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    run = subprocess.run(
        [sys.executable, str(script), op.name],
        env=environment,
        timeout=600,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("done") == 3
