"""Programs whose calls do not depend on each other end.

jaxlib 0.10's LAPACK calls can wait for each other for ever (docs/known_wrong_answers.md).
"""

import os
import subprocess
import sys
from pathlib import Path

import ops

ROWS = [*ops.ONE_EACH, *ops.of("solve_gen"), *ops.COMPOSITE[:1], *ops.COMPOSITE[-1:]]


def test_independent_calls_end():
    names = [op.name for op in ROWS]
    script = Path(__file__).with_name("independent_calls.py")
    flags = os.environ["XLA_FLAGS"].replace("--xla_force_host_platform_device_count=8", "")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    run = subprocess.run(
        [sys.executable, str(script), *names],
        env=environment,
        timeout=1200,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("done") == 3 * len(names)
