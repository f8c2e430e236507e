"""The arguments of JAX's own functions, by position and by name; messages for wrong ones."""

import inspect

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
import numpy as np
import pytest
from families.general import MAKE

import jax_batched as jb
from jax_batched._matrices import normal

STANDS_FOR = {
    jb.cholesky: jnp.linalg.cholesky,
    jb.triangular_solve: jax.lax.linalg.triangular_solve,
    jb.solve_triangular: jsl.solve_triangular,
    jb.cho_factor: jsl.cho_factor,
    jb.cho_solve: jsl.cho_solve,
    jb.solve: jsl.solve,
}
FLAG = (False, True)
VALUES = {
    "trans": (0, 1, 2, "N", "T", "C"),
    "assume_a": ("gen", "sym", "her", "pos"),
    "debug": (None, False, True),
}
each_function = pytest.mark.parametrize(
    ("ours", "theirs"), STANDS_FOR.items(), ids=[f.__name__ for f in STANDS_FOR]
)


def parameters(f):
    return inspect.signature(f).parameters


def options(f):
    """The parameters that are no operands."""
    return {name: p for name, p in parameters(f).items() if p.default is not p.empty}


def call_of(f, values):
    """Positional and keyword arguments with which f takes values, by position where it may be."""
    keyword = {
        n: v for n, v in values.items() if parameters(f)[n].kind is inspect.Parameter.KEYWORD_ONLY
    }
    return [v for n, v in values.items() if n not in keyword], keyword


@each_function
def test_every_parameter_by_position_and_by_name(ours, theirs):
    names = {name: name for name in parameters(theirs)}
    positional, keyword = call_of(theirs, names)
    assert inspect.signature(ours).bind(*positional, **keyword).arguments == names
    assert inspect.signature(ours).bind(**names).arguments == names
    for name, parameter in options(theirs).items():
        assert options(ours)[name].default == parameter.default
    for name, parameter in options(ours).items():
        assert name in names or parameter.kind is parameter.KEYWORD_ONLY


def systems(f, chosen):
    """Operands for f: a matrix of the kind that the options ask for, and right-hand sides."""
    rng = np.random.default_rng(0)
    a = MAKE[chosen.get("assume_a", "pos")](rng, complex, (3, 3))
    b = normal(rng, complex, (3, 3))
    if f is jb.cho_solve:
        return [((a, lower), b) for lower in FLAG]
    return [(a, b) if "b" in parameters(f) else (a,)]


@each_function
def test_results_are_jaxs_for_each_option_by_position(ours, theirs):
    defaults = {name: parameter.default for name, parameter in options(theirs).items()}
    for name in defaults:
        for value in VALUES.get(name, FLAG):
            chosen = {**defaults, name: value}
            positional, keyword = call_of(theirs, chosen)
            for operands in systems(ours, chosen):
                result, expected = (f(*operands, *positional, **keyword) for f in (ours, theirs))
                for x, y in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
                    np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-12)


# Arguments of the wrong kind.

FUNCTIONS = (*STANDS_FOR, jb.refined_solve)
IGNORED = ("debug", "check_finite")
FLAGS = [
    (f, name)
    for f in FUNCTIONS
    for name, parameter in options(f).items()
    if isinstance(parameter.default, bool) and name not in IGNORED
]
WORDS = [
    (f, name)
    for f in FUNCTIONS
    for name, parameter in options(f).items()
    if type(parameter.default) in (str, int)
]
NO_ARRAYS = (None, "abc", [[1.0], [1.0, 2.0]], [[None]], (np.eye(3), True), {}, np.array([["a"]]))


def name_of(value):
    return getattr(value, "__name__", value)


def refused(error, words, f, *operands, **chosen):
    with pytest.raises(error) as raised:
        f(*operands, **chosen)
    assert str(raised.value).startswith(f"{f.__name__}: ")
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize("f", FUNCTIONS, ids=name_of)
def test_what_is_no_array_is_refused(f):
    operands = systems(f, {})[0]
    for position, name in enumerate(parameters(f)):
        if position == len(operands):
            break
        for given in NO_ARRAYS:
            wrong = list(operands)
            wrong[position] = (given, True) if name == "c_and_lower" else given
            letter = "c" if name == "c_and_lower" else name
            refused(TypeError, (f"{letter} must be an array", "float32", "complex128"), f, *wrong)


def test_what_is_no_pair_is_refused():
    c = np.eye(2)
    for given, words in (
        (c, "an array of shape (2, 2) and dtype float64"),
        (np.stack([c, c]), "an array of shape (2, 2, 2)"),
        (None, "None"),
        ("ab", "'ab'"),
        ((c,), "must be a pair"),
        ((c, True, False), "must be a pair"),
    ):
        refused(TypeError, ("(c, lower)", "cho_factor", words), jb.cho_solve, given, c)
    for given in (c.tolist(), (True, c), (c, None)):
        refused(TypeError, ("(c, lower)", "True or False"), jb.cho_solve, given, c)


@pytest.mark.parametrize(("f", "name"), [row for row in FLAGS if row[0] in STANDS_FOR], ids=name_of)
def test_a_flag_may_be_a_number_or_an_array_of_one(f, name):
    operands = systems(f, {})[0]
    for given in (True, False):
        expected = jax.tree.leaves(f(*operands, **{name: given}))
        for same in (int(given), np.bool_(given), jnp.array(given), np.array([given])):
            result = jax.tree.leaves(f(*operands, **{name: same}))
            for x, y in zip(result, expected, strict=True):
                np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(("f", "name"), FLAGS, ids=name_of)
def test_other_flags_are_refused(f, name):
    operands = systems(f, {})[0]
    for given, words in (
        (None, "None"),
        ("no", "'no'"),
        (2, "2"),
        (0.0, "0.0"),
        ([True], "[True]"),
        (np.array([True, False]), "an array of shape (2,) and dtype bool"),
    ):
        refused(TypeError, (name, "True or False", f"got {words}"), f, *operands, **{name: given})
    with pytest.raises(TypeError, match=rf"{f.__name__}: {name} must be .*got a traced array"):
        jax.jit(lambda flag: f(*operands, **{name: flag}))(True)


@pytest.mark.parametrize(("f", "name"), WORDS, ids=name_of)
def test_other_words_are_refused(f, name):
    operands = systems(f, {})[0]
    for given in (None, "none", 7, ["N"], np.eye(3), jnp.arange(2)):
        refused(ValueError, (name, "must be one of"), f, *operands, **{name: given})
    with pytest.raises(ValueError, match=rf"{f.__name__}: {name} must be one of.*traced"):
        jax.jit(lambda word: f(*operands, **{name: word}))(1)


@pytest.mark.parametrize("name", ("max_steps", "tol"))
def test_other_numbers_are_refused(name):
    operands = systems(jb.refined_solve, {})[0]
    for given in (-1, np.inf, np.nan, "1", [1], np.eye(3)):
        refused(ValueError, (name, "must be"), jb.refined_solve, *operands, **{name: given})
