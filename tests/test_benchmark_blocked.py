"""The benchmark of ways to divide large matrices."""

import json

import pytest


@pytest.mark.parametrize("op", ("cholesky", "lu"))
def test_a_row_of_every_plan(op, benchmark_module, tmp_path, capsys, monkeypatch):
    blocked = benchmark_module("blocked")
    plans = blocked.PLANS[op][:1]
    monkeypatch.setitem(blocked.PLANS, op, plans)
    case = ["--op", op, "--dtype", "float32", "--n", "150", "--batch", "2"]
    assert blocked.main([*case, "--output-dir", str(tmp_path)]) == 0
    (file,) = tmp_path.iterdir()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert {row["variant"] for row in rows} == {"jax", *map(str, plans)}
    times = {row["variant"]: row["ms"] for row in rows}
    assert f"{times['jax'] / times[str(plans[0])]:.2f}" in capsys.readouterr().out


def test_a_wrong_result_ends_the_run(benchmark_module, monkeypatch):
    blocked = benchmark_module("blocked")
    right = blocked.call_of
    monkeypatch.setattr(blocked, "call_of", lambda *x: lambda a: 1.01 * right(*x)(a))
    with pytest.raises(Exception, match="wrong result"):
        blocked.measure("lu", "float32", 40, 2, 7)
