"""The benchmark of several devices, tried on CPU devices."""

import json

import jax
import jax.numpy as jnp
import pytest


@pytest.fixture
def scaling(benchmark_module):
    return benchmark_module("scaling")


ARGUMENTS = ["--op", "solve_pos", "--dtype", "float32", "--n", "5", "--mebibytes", "0.1"]


@pytest.fixture
def on_the_cpu():
    if jax.default_backend() != "cpu":
        pytest.skip("its devices are those of JAX's default backend")


def test_rows_of_every_number_of_devices(scaling, tmp_path, on_the_cpu):
    assert scaling.main([*ARGUMENTS, "--output-dir", str(tmp_path)]) == 0
    (file,) = tmp_path.iterdir()
    assert file.name.endswith("_scaling.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["scaling"], row["devices"]) for row in rows if row["scaling"] == "weak"] == [
        ("weak", devices) for devices in (1, 2, 4, 8)
    ]
    one = next(row["batch"] for row in rows if row["devices"] == 1)
    for row in rows:
        assert row["batch"] == (one * row["devices"] if row["scaling"] == "weak" else one)
        alone = next(r for r in rows if r["devices"] == 1 and r["scaling"] == row["scaling"])
        ideal = 1 if row["scaling"] == "weak" else row["devices"]
        assert row["efficiency"] == pytest.approx(alone["ms"] / row["ms"] / ideal, rel=1e-3)


def test_wrong_results_and_communication_are_noticed(scaling, on_the_cpu):
    case = scaling.Case("cholesky", "float32", 5, 0, 8)
    arrays = scaling.operands(case, 16, 2)
    _, compiled = scaling.program(case, arrays)
    scaling.verify(compiled, case, arrays)

    class Wrong:
        def as_text(self):
            return compiled.as_text()

        def __call__(self, *xs):
            return jax.tree.map(lambda x: x.at[-1].add(1e-6), compiled(*xs))

    with pytest.raises(scaling.WrongScalingError, match="differ from one"):
        scaling.verify(Wrong(), case, arrays)
    gathering = jax.jit(lambda a: jnp.sum(a)).lower(*arrays).compile()
    with pytest.raises(scaling.WrongScalingError, match="all-reduce"):
        scaling.verify(gathering, case, arrays)
