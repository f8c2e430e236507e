"""The program that checks and times every operation on a user's machine."""

import jax
import jax.numpy as jnp
import pytest

from jax_batched import _ffi, check

NAMES = [x.name for x in check.CHECKS]


def run(capsys, *arguments):
    code = check.main([*arguments, "--mebibytes", "0.01"])
    return code, capsys.readouterr().out


def lines(text):
    """The lines of the tables by operation, one for each device."""
    found = {name: [] for name in NAMES}
    for line in text.splitlines():
        for name in NAMES:
            if line.startswith((f"{name}  ", f"{name} WRONG")):
                found[name].append(line)
    return found


def test_rows_name_operations():
    assert {x.operation for x in check.CHECKS} <= {"", *_ffi.OPERATIONS}
    assert len(set(NAMES)) == len(NAMES)


def test_right_results(capsys):
    code, text = run(capsys, "--n", "3", "9", "--op", "cholesky", "lstsq")
    assert code == 0
    assert f"jax {jax.__version__}" in text
    assert "all right" in text
    found = lines(text)
    for device in ("cpu", jax.default_backend()):
        assert f"\n{device}, " in text
    for name in ("cholesky", "lstsq"):
        assert found[name]
        assert not any("WRONG" in line for line in found[name])


def test_a_wrong_result_is_named(capsys, monkeypatch):
    row = check.CHECKS[NAMES.index("inv")]
    recipe = row.recipe._replace(call=lambda accuracy: lambda a: jnp.linalg.inv(a) * 1.001)
    monkeypatch.setattr(check, "CHECKS", [row._replace(recipe=recipe)])
    code, text = run(capsys, "--n", "4", "--op", "inv")
    assert code == 1
    assert "inv WRONG" in text
    assert "inv, float32, n = 4: its ratio is " in text


def test_a_call_that_fails_is_named(capsys, monkeypatch):
    def fails(*_):
        raise jax.errors.JaxRuntimeError("INTERNAL: a fault\nand more")

    row = check.CHECKS[NAMES.index("inv")]
    recipe = row.recipe._replace(call=lambda accuracy: lambda a: jax.pure_callback(fails, a, a))
    monkeypatch.setattr(check, "CHECKS", [row._replace(recipe=recipe, dtypes=("float32",))])
    code, text = run(capsys, "--n", "4", "--op", "inv")
    assert code == 1
    assert "inv, float32, n = 4: " in text


def test_stock_jax_may_fail(capsys, monkeypatch):
    def fails(a):
        raise jax.errors.JaxRuntimeError("INTERNAL: a fault")

    row = check.CHECKS[NAMES.index("inv")]
    monkeypatch.setattr(check, "CHECKS", [row._replace(stock=fails, dtypes=("float32",))])
    code, text = run(capsys, "--n", "4", "--op", "inv")
    assert code == 0
    assert lines(text)["inv"][0].endswith("-")


@pytest.mark.parametrize(
    "arguments", (("--n", "0"), ("--n", "x"), ("--mebibytes", "-1"), ("--op", "gamma"))
)
def test_options_out_of_range(capsys, arguments):
    with pytest.raises(SystemExit):
        check.main(arguments)
    assert "error: argument" in capsys.readouterr().err


def test_no_kernel_is_named_beyond_the_last(capsys):
    _, text = run(capsys, "--n", "3", "80", "--op", "eigvalsh")
    assert " lax " in lines(text)["eigvalsh"][0]


@pytest.mark.only_exhaustive
def test_all_operations(capsys):
    code, text = run(capsys, "--n", "1", "7", "33")
    assert code == 0, text
    assert all(lines(text).values())
