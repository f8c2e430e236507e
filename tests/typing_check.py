"""What a type checker must accept, and the types it must find; mypy reads it, nothing runs it."""

from typing import assert_type

import jax

import jax_batched as jb

Pair = tuple[jax.Array, jax.Array]


def without_info(a: jax.Array, b: jax.Array) -> None:
    assert_type(jb.cholesky(a), jax.Array)
    assert_type(jb.cholesky(a, upper=True, return_info=False), jax.Array)
    assert_type(jb.solve(a, b), jax.Array)
    assert_type(jb.solve(a, b, assume_a="pos", return_info=False), jax.Array)


def with_info(a: jax.Array, b: jax.Array) -> None:
    assert_type(jb.cholesky(a, return_info=True), Pair)
    assert_type(jb.solve(a, b, assume_a="pos", return_info=True), Pair)
    x, info = jb.solve(a, b, True, return_info=True)
    assert_type((x, info), Pair)


def as_a_flag_says(a: jax.Array, b: jax.Array, flag: bool) -> None:
    assert_type(jb.cholesky(a, return_info=flag), jax.Array | Pair)
    assert_type(jb.solve(a, b, assume_a="pos", return_info=flag), jax.Array | Pair)


def in_the_words_of_scipy(a: jax.Array, b: jax.Array) -> None:
    assert_type(jb.solve(a, b, True, False, False, False, True, "her"), jax.Array)
    assert_type(jb.solve_triangular(a, b, "T", True, False, check_finite=False), jax.Array)
    factor = jb.cho_factor(a, True, overwrite_a=False)
    assert_type(factor, tuple[jax.Array, bool])
    assert_type(jb.cho_solve(factor, b, False, True), jax.Array)


def with_a_mask(a: jax.Array, b: jax.Array, where: jax.Array) -> None:
    assert_type(jb.cholesky(a, where=where), jax.Array)
    assert_type(jb.solve(a, b, where=where, return_info=True), Pair)
    assert_type(jb.inv(a, where=None), jax.Array)


def with_sizes(a: jax.Array, b: jax.Array, sizes: jax.Array) -> None:
    assert_type(jb.cholesky(a, sizes=sizes), jax.Array)
    assert_type(jb.solve(a, b, sizes=sizes, return_info=True), Pair)
    assert_type(jb.inv(a, sizes=3), jax.Array)
