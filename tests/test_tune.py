"""The tuner: its table, its choice, and how the library looks a kernel up."""

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from families.cholesky import FUSED, STORED_MAX_N
from families.general import ONE_KERNEL

from jax_batched import _ffi, _tuned, tune
from jax_batched._ffi import Tier
from jax_batched._tuned import Block, Kind
from jax_batched._tuning import measuring, progress
from jax_batched._tuning.calls import (
    DTYPES,
    RECIPES,
    candidates,
    default_sizes,
    measured_sizes,
    nrhs_classes,
)
from jax_batched._tuning.choice import changes, pick, spread
from jax_batched._tuning.file import merge, write
from jax_batched._tuning.measuring import DISTINCT, Point, WrongResultError, measure

TREE = Path(__file__).parents[1]

CHOLESKY = Kind(90, "cholesky", False, "float32")
SOLVE = Kind(80, "cho_solve", False, "complex128")
FAST = Kind(90, "cholesky", True, "float32")
TABLE = {
    SOLVE: Block(
        "a card, a day",
        {1: {1: "thread", 2: "thread", 3: "lanes_shared"}, None: {3: "block_columns"}},
    ),
    CHOLESKY: Block(
        "another card", {None: {n: "warp" if n < 9 else "block" for n in range(1, 17)}}
    ),
    FAST: Block("another card", {None: {16: "warp.wide"}}),
}
TIERS = [
    Tier("cholesky", "float32", "thread", 1, 16, 0, False),
    Tier("cholesky", "float32", "warp", 9, 24, 80, False),
    Tier("cholesky", "float32", "block", 1, 512, 0, False),
    Tier("cholesky", "float32", "tensor", 1, 512, 90, True),
    Tier("cholesky", "float64", "block", 1, 512, 0, False),
]


def test_a_table_survives_writing_and_reading():
    assert _tuned.read_table(_tuned.write_table(TABLE), "a file") == TABLE
    assert _tuned.read_table(_tuned.write_table({}), "a file") == {}


def test_the_rows_of_a_table():
    assert list(_tuned.rows(TABLE)) == [
        (80, "cho_solve", False, "complex128", 1, 1, 2, "thread"),
        (80, "cho_solve", False, "complex128", 1, 3, 3, "lanes_shared"),
        (80, "cho_solve", False, "complex128", None, 3, 3, "block_columns"),
        (90, "cholesky", False, "float32", None, 1, 8, "warp"),
        (90, "cholesky", False, "float32", None, 9, 16, "block"),
        (90, "cholesky", True, "float32", None, 16, 16, "warp.wide"),
    ]


ROW = {"max_nrhs": None, "min_n": 1, "max_n": 8, "kernel": "warp"}
ENTRY = {
    "capability": 90,
    "operation": "cholesky",
    "accuracy": "ieee",
    "dtype": "float32",
    "measured": "a card",
    "rows": [ROW],
}


@pytest.mark.parametrize(
    ("content", "message"),
    (
        ("{", "no 'tables'"),
        ({}, "no 'tables'"),
        ({"tables": [3]}, "table 0"),
        ({"tables": [ENTRY | {"accuracy": "maybe"}]}, "table 0: accuracy is 'maybe'"),
        ({"tables": [{"accuracy": "fast"}]}, "table 0: 'capability' is missing"),
        ({"tables": [ENTRY, ENTRY]}, r"table 1 \(sm_90 cholesky float32\): there is another"),
        ({"tables": [ENTRY | {"rows": [ROW, {}]}]}, r".*float32\), row 1: 'max_nrhs' is missing"),
        ({"tables": [ENTRY | {"rows": [ROW | {"max_n": 0}]}]}, ".*row 0: sizes that are no range"),
        ({"tables": [ENTRY | {"rows": [ROW | {"kernel": 3}]}]}, ".*row 0: 'kernel'"),
    ),
)
def test_what_cannot_be_read_is_named(content, message):
    text = content if isinstance(content, str) else json.dumps(content)
    with pytest.raises(ValueError, match=f"my.json: {message}"):
        _tuned.read_table(text, "my.json")


def chosen(operation="cholesky", dtype="float32", n=8, nrhs=1, fast=False, capability=90):
    return _ffi.chosen_cuda_kernel(operation, dtype, n, nrhs, fast, capability)


def imported(program, **environment):
    """What a fresh interpreter prints or, with exit status 1, the last line of its error."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],  # -P: the installed package
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() if done.returncode == 0 else done.stderr.splitlines()[-1]


def test_a_users_file_comes_before_the_packages(tmp_path):
    """Also for triangular solves, which the package has no rows of."""
    program = (
        "from jax_batched._ffi import chosen_cuda_kernel as f\n"
        "print(f('cholesky', 'float32', 16, 1, False, 90), f('cholesky', 'float32', 17, 1, False,"
        " 90), f('triangular_solve', 'float64', 8, 1, False, 90))"
    )
    own = ENTRY | {"rows": [ROW | {"min_n": 16, "max_n": 16, "kernel": "warp"}]}
    solve = {"operation": "triangular_solve", "dtype": "float64"}
    solve |= {"rows": [ROW | {"max_nrhs": 1, "kernel": "block_columns"}]}
    file = tmp_path / "jax_batched" / "tuned.json"
    file.parent.mkdir()
    file.write_text(json.dumps({"tables": [own, ENTRY | solve]}))
    packages = imported(program, JAX_BATCHED_TUNED="")
    assert packages == "thread warp thread"
    assert imported(program, JAX_BATCHED_TUNED=str(file)) == "warp warp block_columns"
    environment = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert imported(
        f"import os; os.environ.pop('JAX_BATCHED_TUNED', 0)\n{program}", **environment
    ) == ("warp warp block_columns")
    assert imported(program, JAX_BATCHED_TUNED="", **environment) == packages


@pytest.mark.parametrize(
    ("content", "message"),
    (
        (None, "JAX_BATCHED_TUNED={file}: No such file or directory"),
        ({"tables": [{}]}, "{file}: table 0: 'accuracy' is missing or of another type"),
        (
            {"tables": [ENTRY | {"rows": [ROW | {"kernel": "wrap"}]}]},
            "{file}: sm_90 cholesky float32: no kernel 'wrap' serves n = 1",
        ),
        (
            {"tables": [ENTRY | {"rows": [ROW | {"max_n": 24, "kernel": "thread"}]}]},
            "{file}: sm_90 cholesky float32: no kernel 'thread' serves n = 17",
        ),
    ),
)
def test_a_users_file_that_is_wrong_fails_the_import(tmp_path, content, message):
    file = tmp_path / "my.json"
    if content is not None:
        file.write_text(json.dumps(content))
    error = imported("import jax_batched", JAX_BATCHED_TUNED=str(file))
    assert error == "ValueError: " + message.format(file=file)


def test_what_is_set_decides():
    before = chosen()
    table = {CHOLESKY: Block("a card", {None: {8: "block"}})}
    assert before != "block"
    try:
        _ffi.set_tuned(table)
        assert chosen() == "block"
        assert chosen(capability=120) == "block"  # the nearest lower one
        assert chosen(capability=80) == chosen(n=7) == before
    finally:
        _ffi.set_tuned(_tuned.load(_ffi._served_from))
    assert chosen() == before


def test_new_measurements_replace_only_their_own_sizes():
    table = dict(TABLE)
    merge(
        table,
        SOLVE,
        Block("today", {1: {3: "block_rows", 4: "block_rows"}, 8: {1: "lanes_shared"}}),
    )
    assert table[SOLVE] == Block(
        "today",
        {
            1: {1: "thread", 2: "thread", 3: "block_rows", 4: "block_rows"},
            8: {1: "lanes_shared"},
            None: {3: "block_columns"},
        },
    )
    assert table[CHOLESKY] == TABLE[CHOLESKY]


def test_new_measurements_are_written_beside_others(tmp_path):
    file = tmp_path / "new folder" / "tuned.json"
    write(file, {SOLVE: TABLE[SOLVE]})
    write(file, {CHOLESKY: TABLE[CHOLESKY], FAST: TABLE[FAST]})
    assert _tuned.read_table(file.read_text(), "a file") == TABLE


def test_the_packages_table_is_as_the_tuner_writes_it():
    text = _tuned.PACKAGE_FILE.read_text()
    assert _tuned.write_table(_tuned.read_table(text, "")) == text


def test_noise_does_not_change_the_choice():
    times = {"thread": 1.00, "warp": 1.01, "block": 1.5}
    assert pick(times, ("warp", "thread")) == "warp"
    assert pick(times, ("block", "warp")) == "warp"
    assert pick(times, ("block", "")) == "thread"


def test_candidates_are_those_that_the_gpu_and_the_accuracy_allow():
    assert candidates(CHOLESKY, 9, TIERS) == ["thread", "warp", "block"]
    assert candidates(CHOLESKY._replace(capability=75), 9, TIERS) == ["thread", "block"]
    assert candidates(FAST, 25, TIERS) == ["block", "tensor"]
    assert candidates(CHOLESKY._replace(dtype="float64"), 9, TIERS) == ["block"]


@pytest.mark.parametrize(("kind", "last"), ((CHOLESKY, 24), (FAST, 512)))
def test_default_sizes_hold_the_borders_of_every_kernel(kind, last):
    sizes = default_sizes(kind, TIERS)
    assert {1, 8, 16, 24, last} <= set(sizes)
    assert max(sizes) == last
    for low, high in itertools.pairwise(sizes):
        between = {tuple(candidates(kind, n, TIERS)) for n in range(low + 1, high + 1)}
        assert len(between) == 1


def test_only_sizes_with_a_choice_are_measured():
    assert measured_sizes(CHOLESKY, (8, 24, 25, 600), TIERS) == [8, 24]
    assert measured_sizes(FAST, (8, 25, 600), TIERS) == [8, 25]
    ieee_alone = [tier for tier in TIERS if not tier.fast]
    assert measured_sizes(FAST, (8, 25), ieee_alone) == []


def test_right_hand_sides_that_are_measured():
    assert nrhs_classes("solve_pos", [4]) == {1: None}
    assert nrhs_classes("cho_solve", [1, 64]) == {1: 1, 64: None}


def test_sizes_between_take_the_kernel_of_the_next_one_measured():
    winners = {4: "thread", 8: "block", 24: "warp"}
    kernels = spread(CHOLESKY, winners, TIERS)
    assert kernels == {4: "thread"} | dict.fromkeys(range(5, 9), "block") | dict.fromkeys(
        range(9, 25), "warp"
    )
    assert 8 not in spread(CHOLESKY, {7: "thread", 24: "warp"}, TIERS)


def test_what_changed_is_told_with_the_gain():
    new = dict.fromkeys(range(1, 9), "warp")
    old = {**dict.fromkeys(range(1, 7), "thread"), 7: "warp", 8: ""}
    times = {2: {"thread": 3.0, "warp": 1.5}, 6: {"thread": 3.0, "warp": 2.0}, 8: {"warp": 1.0}}
    assert list(changes(new, old, times)) == [
        "n = 1..6: thread -> warp, 1.50 to 2.00 times as fast",
        "n = 8: none -> warp",
    ]


@pytest.mark.parametrize("operation", RECIPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_check_of_a_kernel_passes_right_results_and_no_others(operation, dtype):
    point = Point(Kind(90, operation, False, dtype), 5, 3, 0.05)
    assert point.operands[0].shape[0] > DISTINCT
    assert measure({"": point.program("")})[""] > 0
    right = point.recipe.ratio
    point.recipe = point.recipe._replace(ratio=lambda *x: right(*x[:-1], 1.01 * x[-1]))
    with pytest.raises(WrongResultError, match="ratio"):
        point.program("")


def test_results_that_depend_on_the_position_are_wrong():
    x = np.ones((3 * DISTINCT, 2, 2), np.float32)
    assert measuring._repeats(x)
    x[-1, 0, 0] = 2
    assert not measuring._repeats(x)


def test_progress_without_rich(monkeypatch, capsys):
    monkeypatch.setattr(progress.importlib.util, "find_spec", lambda name: None)
    with progress.progress(40) as step:
        for i in range(40):
            step(f"n={i}")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 20
    assert lines[-1] == "40/40  n=39"


def test_without_a_gpu_the_reason_is_told():
    if jax.default_backend() != "cpu":
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit, match="needs a GPU, and JAX's default device here is a CPU"):
        tune.main([])


def test_write_needs_a_name_if_there_is_no_users_file(monkeypatch, capsys):
    monkeypatch.setenv(_tuned.VARIABLE, "")
    with pytest.raises(SystemExit):
        tune.main(["--write"])
    assert "name a file" in capsys.readouterr().err


def test_the_packages_table_names_compiled_kernels():
    _tuned.check(
        _tuned.read_table(_tuned.PACKAGE_FILE.read_text(), ""), "the package's", _ffi._served_from
    )


@pytest.mark.parametrize("capability", [75, 80, 90, 120])
def test_every_gpu_has_a_kernel_for_every_call(capability):
    def largest(operation, dtype, nrhs):
        if operation == "solve_pos":
            return FUSED[dtype][-1][0]
        return ONE_KERNEL[dtype][nrhs > 16] if operation in ("solve_gen", "inv") else 512

    for operation, dtype, fast in itertools.product(RECIPES, DTYPES, (False, True)):
        kind = Kind(capability, operation, fast, dtype)
        for nrhs in (1, 2, 33):
            most = largest(operation, dtype, nrhs)
            for n in (1, 2, 8, 9, 31, 32, 33, 64, 65, most):
                if n <= most:
                    kernel = _ffi.chosen_cuda_kernel(operation, dtype, n, nrhs, fast, capability)
                    assert kernel in candidates(kind, n, _ffi.cuda_tiers())


@pytest.mark.parametrize("capability", [75, 80, 90, 120])
def test_every_gpu_has_a_kernel_for_16_bit_elements(capability):
    for operation in ("cholesky", "solve_pos"):
        kind = Kind(capability, operation, False, "float16")
        for n in range(1, STORED_MAX_N[operation] + 1):
            served = candidates(kind, n, _ffi.cuda_tiers())
            for dtype in ("float16", "bfloat16"):
                assert _ffi.chosen_cuda_kernel(operation, dtype, n, 1, False, capability) in served


LOOK_UP = """
#include <array>

#include "ffi/cuda/runtime/table.h"
using namespace jax_batched;
using namespace jax_batched::cuda;

constexpr std::array<TunedRow, 5> kTuned = {{
    {80, "cholesky", false, DType::kFloat32, kAny, 1, 32, "warp"},
    {90, "cholesky", false, DType::kFloat32, kAny, 1, 8, "thread"},
    {90, "cholesky", true, DType::kFloat32, kAny, 1, 4, "fast"},
    {90, "cho_solve", false, DType::kFloat32, 1, 1, 64, "lanes_shared"},
    {90, "cho_solve", false, DType::kFloat32, kAny, 1, 64, "block_rows"},
}};
constexpr std::string_view tuned(std::string_view operation, int64_t n, int64_t nrhs, bool fast,
                                 int capability, DType dtype = DType::kFloat32) {
  return tuned_kernel(kTuned, Call{operation, dtype, n, nrhs, fast, capability});
}
static_assert(tuned("cholesky", 8, 1, false, 90) == "thread");
static_assert(tuned("cholesky", 9, 1, false, 90) == "");  // not measured on sm_90
static_assert(tuned("cholesky", 9, 1, false, 89) == "warp");  // the nearest lower one
static_assert(tuned("cholesky", 8, 1, false, 120) == "thread");
static_assert(tuned("cholesky", 8, 1, false, 75) == "");
static_assert(tuned("cholesky", 8, 1, false, 90, DType::kFloat64) == "");
static_assert(tuned("cholesky", 4, 1, true, 90) == "fast");
static_assert(tuned("cho_solve", 8, 1, false, 90) == "lanes_shared");
static_assert(tuned("cho_solve", 8, 2, false, 90) == "block_rows");
static_assert(tuned("cholesky", 8, 1, true, 90) == "");

struct Warp {
  static constexpr std::string_view kName = "warp";
};
struct Block {
  static constexpr std::string_view kName = "block";
};
using AnyRow = Row<std::variant<Warp, Block>>;
constexpr AnyRow kTable[] = {
    {DType::kFloat32, 1, 64, Warp{}, {.variant = "wide", .capability = 90}},
    {DType::kFloat32, 1, 64, Warp{}, {.variant = "tensor", .capability = 80, .fast = true}},
    {DType::kFloat32, 1, 32, Warp{}},
    {DType::kFloat32, 1, 64, Block{}},
};
constexpr std::array<TunedRow, 0> kNothing = {};
constexpr int64_t row(int64_t n, bool fast, int capability, std::string_view name = {}) {
  const Call call{"an operation", DType::kFloat32, n, 1, fast, capability};
  return find_row(kTable, kNothing, call, name);
}
static_assert(names_are_distinct(kTable));
static_assert(row(8, false, 90) == 0);
static_assert(row(8, false, 80) == 2);
static_assert(row(8, true, 80) == 1);
static_assert(row(40, false, 75) == 3);
static_assert(row(8, false, 90, "warp") == 2);
static_assert(row(8, false, 90, "warp.wide") == 0);
static_assert(row(8, false, 80, "warp.wide") == kNoRow);
static_assert(row(8, false, 90, "warp.tensor") == kNoRow);
static_assert(row(65, false, 90) == kNoRow);
static_assert(largest_n(kTable, DType::kFloat32) == 64);

// Measured: "block" for "ieee", "warp.tensor" up to 8 for "fast".
constexpr std::array<TunedRow, 2> kMeasured = {{
    {80, "an operation", false, DType::kFloat32, kAny, 1, 64, "block"},
    {80, "an operation", true, DType::kFloat32, kAny, 1, 8, "warp.tensor"},
}};
constexpr AnyRow kNoFast[] = {
    {DType::kFloat32, 1, 64, Warp{}},
    {DType::kFloat32, 1, 64, Block{}},
};
template <class Table>
constexpr int64_t best(const Table& table, int64_t n, bool fast) {
  return find_row(table, kMeasured, Call{"an operation", DType::kFloat32, n, 1, fast, 80}, {});
}
static_assert(best(kTable, 8, false) == 3);
static_assert(best(kTable, 8, true) == 1);
static_assert(find_row(kTable, kMeasured,
                       Call{.operation = "an operation", .dtype = DType::kFloat32, .n = 8,
                            .capability = 80, .m = 9}, {}) == 2);  // a rectangle
static_assert(best(kTable, 9, true) == 1);   // the first, for "fast" alone
static_assert(best(kNoFast, 9, true) == 1);  // as "ieee"
"""


def test_the_look_up_in_cpp(tmp_path):
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    source = tmp_path / "look_up.cc"
    source.write_text(LOOK_UP)
    command = [compiler, "-std=c++20", "-Wall", "-Wextra", "-fsyntax-only", f"-I{TREE}", source]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
