"""The benchmark of the variants of a triangular solve."""

import json

import pytest


@pytest.fixture
def variants(benchmark_module):
    return benchmark_module("variants")


ARGUMENTS = ["--dtype", "float32", "--n", "5", "--nrhs", "3", "--mebibytes", "0.01"]


def test_a_row_of_every_variant(variants, tmp_path, capsys):
    assert variants.main([*ARGUMENTS, "--output-dir", str(tmp_path)]) == 0
    (file,) = tmp_path.iterdir()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert {row["variant"] for row in rows} == {str(v) for v in variants.VARIANTS}
    assert len(rows) == 8
    times = [row["ms"] for row in rows]
    assert f"{max(times) / min(times):.2f}" in capsys.readouterr().out


def test_a_wrong_result_ends_the_run(variants, monkeypatch):
    right = variants.Variant.call
    monkeypatch.setattr(variants.Variant, "call", lambda *x: 1.01 * right(*x))
    with pytest.raises(RuntimeError, match=r"left lower T, .*wrong result"):
        variants.measure("float32", 5, 3, 9, 7)
