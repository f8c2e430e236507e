"""The tuner: its table, its choice, and how the library looks a kernel up."""

import itertools
import shutil
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest
from families.cholesky import FUSED, STORED_MAX_N

from jax_batched import _ffi, tune
from jax_batched._ffi import Tier
from jax_batched.tune import Block, Kind

TREE = Path(__file__).parents[1]

CHOLESKY = Kind(90, "cholesky", False, "float32")
SOLVE = Kind(80, "cho_solve", False, "complex128")
FAST = Kind(90, "cholesky", True, "float32")
TABLE = {
    SOLVE: Block("a card, a day", {1: {1: "thread", 2: "thread", 3: "warp"}, None: {3: "columns"}}),
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
    assert tune.read_table(tune.write_table(TABLE)) == TABLE
    assert tune.read_table(tune.write_table({})) == {}


def test_the_rows_of_a_written_table():
    rows = [line.strip() for line in tune.write_table(TABLE).splitlines() if "DType" in line]
    assert rows == [
        '{80, "cho_solve", false, DType::kComplex128, 1, 1, 2, "thread"},',
        '{80, "cho_solve", false, DType::kComplex128, 1, 3, 3, "warp"},',
        '{80, "cho_solve", false, DType::kComplex128, kAny, 3, 3, "columns"},',
        '{90, "cholesky", false, DType::kFloat32, kAny, 1, 8, "warp"},',
        '{90, "cholesky", false, DType::kFloat32, kAny, 9, 16, "block"},',
        '{90, "cholesky", true, DType::kFloat32, kAny, 16, 16, "warp.wide"},',
    ]


def test_a_row_that_cannot_be_read_is_an_error():
    with pytest.raises(ValueError, match="cannot read"):
        tune.read_table('    {90, "cholesky", maybe, DType::kFloat32, kAny, 1, 8, "warp"},')


def test_new_measurements_replace_only_their_own_sizes():
    table = dict(TABLE)
    tune.merge(table, SOLVE, Block("today", {1: {3: "block", 4: "block"}, 8: {1: "warp"}}))
    assert table[SOLVE] == Block(
        "today",
        {
            1: {1: "thread", 2: "thread", 3: "block", 4: "block"},
            8: {1: "warp"},
            None: {3: "columns"},
        },
    )
    assert table[CHOLESKY] == TABLE[CHOLESKY]


def test_the_committed_table_is_as_the_tuner_writes_it():
    text = (TREE / tune.TABLE).read_text()
    assert tune.write_table(tune.read_table(text)) == text


def test_noise_does_not_change_the_choice():
    times = {"thread": 1.00, "warp": 1.01, "block": 1.5}
    assert tune.pick(times, ("warp", "thread")) == "warp"
    assert tune.pick(times, ("block", "warp")) == "warp"
    assert tune.pick(times, ("block", "")) == "thread"


def test_candidates_are_those_that_the_gpu_and_the_accuracy_allow():
    assert tune.candidates(CHOLESKY, 9, TIERS) == ["thread", "warp", "block"]
    assert tune.candidates(CHOLESKY._replace(capability=75), 9, TIERS) == ["thread", "block"]
    assert tune.candidates(FAST, 25, TIERS) == ["block", "tensor"]
    assert tune.candidates(CHOLESKY._replace(dtype="float64"), 9, TIERS) == ["block"]


@pytest.mark.parametrize(("kind", "last"), ((CHOLESKY, 24), (FAST, 512)))
def test_default_sizes_hold_the_borders_of_every_kernel(kind, last):
    sizes = tune.default_sizes(kind, TIERS)
    assert {1, 8, 16, 24, last} <= set(sizes)
    assert max(sizes) == last
    for low, high in itertools.pairwise(sizes):
        between = {tuple(tune.candidates(kind, n, TIERS)) for n in range(low + 1, high + 1)}
        assert len(between) == 1


def test_only_sizes_with_a_choice_are_measured():
    assert tune.measured_sizes(CHOLESKY, (8, 24, 25, 600), TIERS) == [8, 24]
    assert tune.measured_sizes(FAST, (8, 25, 600), TIERS) == [8, 25]
    ieee_alone = [tier for tier in TIERS if not tier.fast]
    assert tune.measured_sizes(FAST, (8, 25), ieee_alone) == []


def test_right_hand_sides_that_are_measured():
    assert tune.nrhs_classes("solve_pos", [4]) == {1: None}
    assert tune.nrhs_classes("cho_solve", [1, 64]) == {1: 1, 64: None}


def test_sizes_between_take_the_kernel_of_the_next_one_measured():
    winners = {4: "thread", 8: "block", 24: "warp"}
    kernels = tune.spread(CHOLESKY, winners, TIERS)
    assert kernels == {4: "thread"} | dict.fromkeys(range(5, 9), "block") | dict.fromkeys(
        range(9, 25), "warp"
    )
    assert 8 not in tune.spread(CHOLESKY, {7: "thread", 24: "warp"}, TIERS)


def test_what_changed_is_told_with_the_gain():
    new = dict.fromkeys(range(1, 9), "warp")
    old = {**dict.fromkeys(range(1, 7), "thread"), 7: "warp", 8: ""}
    times = {2: {"thread": 3.0, "warp": 1.5}, 6: {"thread": 3.0, "warp": 2.0}, 8: {"warp": 1.0}}
    assert list(tune.changes(new, old, times)) == [
        "n = 1..6: thread -> warp, 1.50 to 2.00 times as fast",
        "n = 8: none -> warp",
    ]


@pytest.mark.parametrize("operation", tune.RECIPES)
@pytest.mark.parametrize("dtype", tune.DTYPES)
def test_the_check_of_a_kernel_passes_right_results_and_no_others(operation, dtype):
    point = tune.Point(Kind(90, operation, False, dtype), 5, 3, 0.05)
    assert point.operands[0].shape[0] > tune.DISTINCT
    assert tune.measure({"": point.program("")})[""] > 0
    right = point.recipe.ratio
    point.recipe = point.recipe._replace(ratio=lambda *x: right(*x[:-1], 1.01 * x[-1]))
    with pytest.raises(tune.WrongResultError, match="ratio"):
        point.program("")


def test_results_that_depend_on_the_position_are_wrong():
    x = np.ones((3 * tune.DISTINCT, 2, 2), np.float32)
    assert tune._repeats(x)
    x[-1, 0, 0] = 2
    assert not tune._repeats(x)


def test_progress_without_rich(monkeypatch, capsys):
    monkeypatch.setattr(tune.importlib.util, "find_spec", lambda name: None)
    with tune.progress(40) as step:
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


def test_write_needs_a_source_tree(tmp_path, capsys):
    with pytest.raises(SystemExit):
        tune.main(["--write", str(tmp_path)])
    assert "name the source tree" in capsys.readouterr().err


def needs_cuda_module():
    if not _ffi.cuda_tiers():
        pytest.skip("built without CUDA")


def test_the_committed_table_names_compiled_kernels():
    needs_cuda_module()
    for kind, block in tune.read_table((TREE / tune.TABLE).read_text()).items():
        for kernels in block.kernels.values():
            for n, kernel in kernels.items():
                assert kernel in tune.candidates(kind, n, _ffi.cuda_tiers()), (kind, n)


@pytest.mark.parametrize("capability", [75, 80, 90, 120])
def test_every_gpu_has_a_kernel_for_every_call(capability):
    needs_cuda_module()
    chosen = _ffi.native_module("cuda").chosen_kernel
    for operation in tune.RECIPES:
        for dtype in tune.DTYPES:
            largest = FUSED[dtype][-1][0] if operation == "solve_pos" else 512
            for fast in (False, True):
                kind = Kind(capability, operation, fast, dtype)
                for n in (1, 2, 8, 9, 31, 32, 33, 64, 65, largest):
                    for nrhs in (1, 2, 33):
                        if n <= largest:
                            kernel = chosen(operation, dtype, n, nrhs, fast, capability)
                            assert kernel in tune.candidates(kind, n, _ffi.cuda_tiers())


@pytest.mark.parametrize("capability", [75, 80, 90, 120])
def test_every_gpu_has_a_kernel_for_16_bit_elements(capability):
    needs_cuda_module()
    chosen = _ffi.native_module("cuda").chosen_kernel
    for operation in ("cholesky", "solve_pos"):
        kind = Kind(capability, operation, False, "float16")
        for n in range(1, STORED_MAX_N[operation] + 1):
            served = tune.candidates(kind, n, _ffi.cuda_tiers())
            for dtype in ("float16", "bfloat16"):
                assert chosen(operation, dtype, n, 1, False, capability) in served


LOOK_UP = """
#include "ffi/cuda/tuning.h"
#include "ffi/cuda/tiers.h"
using namespace jax_batched;
using namespace jax_batched::cuda;

constexpr std::array<TunedTier, 5> kTuned = {{
    {80, "cholesky", false, DType::kFloat32, kAny, 1, 32, "warp"},
    {90, "cholesky", false, DType::kFloat32, kAny, 1, 8, "thread"},
    {90, "cholesky", true, DType::kFloat32, kAny, 1, 4, "fast"},
    {90, "cho_solve", false, DType::kFloat32, 1, 1, 64, "warp"},
    {90, "cho_solve", false, DType::kFloat32, kAny, 1, 64, "block"},
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
static_assert(tuned("cho_solve", 8, 1, false, 90) == "warp");
static_assert(tuned("cho_solve", 8, 2, false, 90) == "block");
static_assert(tuned("cholesky", 8, 1, true, 90) == "");

constexpr Tier kTable[] = {
    {DType::kFloat32, 1, 64, "warp", 1, false, 1, 0, 0, false, "wide", 90},
    {DType::kFloat32, 1, 64, "warp", 1, false, 1, 0, 0, false, "tensor", 80, true},
    {DType::kFloat32, 1, 32, "warp", 1, false, 1, 0},
    {DType::kFloat32, 1, 64, "block", 1, false, 1, 0},
};
constexpr int64_t row(int64_t n, bool fast, int capability, std::string_view name = {}) {
  return find_tier(kTable, Call{"no such operation", DType::kFloat32, n, 1, fast, capability},
                   name);
}
static_assert(names_are_distinct(kTable));
static_assert(row(8, false, 90) == 0);
static_assert(row(8, false, 80) == 2);
static_assert(row(8, true, 80) == 1);
static_assert(row(40, false, 75) == 3);
static_assert(row(8, false, 90, "warp") == 2);
static_assert(row(8, false, 90, "warp.wide") == 0);
static_assert(row(8, false, 80, "warp.wide") == kNoTier);
static_assert(row(8, false, 90, "warp.tensor") == kNoTier);
static_assert(row(65, false, 90) == kNoTier);

// Measured: "block" for "ieee", "warp.tensor" up to 8 for "fast".
constexpr std::array<TunedTier, 2> kMeasured = {{
    {80, "an operation", false, DType::kFloat32, kAny, 1, 64, "block"},
    {80, "an operation", true, DType::kFloat32, kAny, 1, 8, "warp.tensor"},
}};
constexpr Tier kNoFast[] = {
    {DType::kFloat32, 1, 64, "warp", 1, false, 1, 0},
    {DType::kFloat32, 1, 64, "block", 1, false, 1, 0},
};
template <size_t kRows>
constexpr int64_t best(const Tier (&table)[kRows], int64_t n, bool fast) {
  return find_tier(table, kMeasured, Call{"an operation", DType::kFloat32, n, 1, fast, 80}, {});
}
static_assert(best(kTable, 8, false) == 3);
static_assert(best(kTable, 8, true) == 1);
static_assert(best(kTable, 9, true) == 1);   // the first, for "fast" alone
static_assert(best(kNoFast, 9, true) == 1);  // as "ieee"
"""


def test_the_look_up_in_cpp(tmp_path):
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    source = tmp_path / "look_up.cc"
    source.write_text(LOOK_UP)
    command = [compiler, "-std=c++17", "-Wall", "-Wextra", "-fsyntax-only", f"-I{TREE}", source]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
