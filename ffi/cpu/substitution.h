// Forward substitution M Y = C, M lower triangular seen through strides (LowerSystem), Y packed.
#pragma once

#include "ffi/cpu/kernels.h"

namespace jax_batched::cpu::JAX_BATCHED_ISA {

template <class T>
struct LowerMatrix {
  const T* start;  // M(0, 0)
  int64_t row, col;
  bool conjugate;
  T operator()(int64_t i, int64_t j) const {
    const T m = start[i * row + j * col];
    return conjugate ? conj(m) : m;
  }
};

// One right-hand side, y(i) at y[i]. Two orders of the same sum: by columns (axpy) if the columns
// of M are contiguous, by rows (dot products in kColumns interleaved partial sums) if the rows are.
// kStep is the contiguous stride, +1 or -1: a constant, so that the loops vectorise.
template <int kStep, class T>
void substitute_by_columns(const LowerMatrix<T>& m, int64_t n, bool unit, T* y) {
  for (int64_t j = 0; j < n; ++j) {
    const T* column = m.start + j * m.col;
    if (!unit) y[j] = divide(y[j], m(j, j));
    const T y_j = m.conjugate ? conj(y[j]) : y[j];
    if (m.conjugate) {
      for (int64_t i = j + 1; i < n; ++i) {
        y[i] = conj(sub_mul(conj(y[i]), column[i * kStep], y_j));
      }
    } else {
      for (int64_t i = j + 1; i < n; ++i) y[i] = sub_mul(y[i], column[i * kStep], y_j);
    }
  }
}

template <int kStep, class T>
void substitute_by_rows(const LowerMatrix<T>& m, int64_t n, bool unit, T* y) {
  for (int64_t i = 0; i < n; ++i) {
    const T* row = m.start + i * m.row;
    T partial[kColumns<T>];
    for (int64_t lane = 0; lane < kColumns<T>; ++lane) partial[lane] = T(0);
    // conj(m) y = conj(m conj(y)): the conjugate moves to y, out of the loop over M.
    const auto accumulate = [&](auto load_y) {
      int64_t j = 0;
      for (; j + kColumns<T> <= i; j += kColumns<T>) {
        for (int64_t lane = 0; lane < kColumns<T>; ++lane) {
          partial[lane] = sub_mul(partial[lane], row[(j + lane) * kStep], load_y(j + lane));
        }
      }
      for (int64_t lane = 0; j < i; ++j, ++lane) {
        partial[lane] = sub_mul(partial[lane], row[j * kStep], load_y(j));
      }
    };
    if (m.conjugate) {
      accumulate([y](int64_t j) { return conj(y[j]); });
    } else {
      accumulate([y](int64_t j) { return y[j]; });
    }
    for (int64_t width = kColumns<T> / 2; width > 0; width /= 2) {
      for (int64_t lane = 0; lane < width; ++lane) {
        partial[lane] = partial[lane] + partial[lane + width];
      }
    }
    const T sum = y[i] + (m.conjugate ? conj(partial[0]) : partial[0]);
    y[i] = unit ? sum : divide(sum, m(i, i));
  }
}

// Several right-hand sides, y(i, r) at y[i * width + r]: blocks of kRows rows and kColumns columns
// of Y stay in registers while row j of Y passes by, Y_i -= m_ij y_j.
template <class T>
void substitute_block(const LowerMatrix<T>& m, int64_t n, bool unit, int64_t width, T* y) {
  constexpr int64_t kRows = 4;
  for (int64_t i0 = 0; i0 < n; i0 += kRows) {
    const int64_t rows = n - i0 < kRows ? n - i0 : kRows;
    for (int64_t r0 = 0; r0 < width; r0 += kColumns<T>) {
      T block[kRows][kColumns<T>];
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t r = 0; r < kColumns<T>; ++r) block[i][r] = y[(i0 + i) * width + r0 + r];
      }
      const auto eliminate = [&](auto row_count) {
        for (int64_t j = 0; j < i0; ++j) {
          const T* y_j = y + j * width + r0;
          for (int64_t i = 0; i < row_count; ++i) {
            const T m_ij = m(i0 + i, j);
            for (int64_t r = 0; r < kColumns<T>; ++r)
              block[i][r] = sub_mul(block[i][r], m_ij, y_j[r]);
          }
        }
      };
      if (rows == kRows) {
        eliminate(std::integral_constant<int64_t, kRows>{});
      } else {
        eliminate(rows);
      }
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = 0; j < i; ++j) {
          const T m_ij = m(i0 + i, i0 + j);
          for (int64_t r = 0; r < kColumns<T>; ++r) {
            block[i][r] = sub_mul(block[i][r], m_ij, block[j][r]);
          }
        }
        const T pivot = unit ? T(1) : m(i0 + i, i0 + i);
        for (int64_t r = 0; r < kColumns<T>; ++r) {
          if (!unit) block[i][r] = divide(block[i][r], pivot);
          y[(i0 + i) * width + r0 + r] = block[i][r];
        }
      }
    }
  }
}

// M from the stored matrix `a` by the strides of `s`.
template <class T>
void substitute(const LowerSystem& s, const T* a, int64_t n, bool unit, int64_t width, T* y) {
  const LowerMatrix<T> m{a + s.a_start, s.a_row, s.a_col, s.conjugate && kIsComplex<T>};
  if (width > 1) {
    substitute_block(m, n, unit, width, y);
  } else if (m.row == 1) {
    substitute_by_columns<1>(m, n, unit, y);
  } else if (m.row == -1) {
    substitute_by_columns<-1>(m, n, unit, y);
  } else if (m.col == 1) {
    substitute_by_rows<1>(m, n, unit, y);
  } else {
    substitute_by_rows<-1>(m, n, unit, y);
  }
}

// Between the right-hand sides in memory and the packed Y, whose padding columns are zero.
template <class T>
void pack(const LowerSystem& s, int64_t n, int64_t nrhs, const T* b, int64_t width, T* y) {
  for (int64_t i = 0; i < n; ++i) {
    const T* row = b + s.x_start + i * s.x_row;
    for (int64_t r = 0; r < nrhs; ++r) y[i * width + r] = row[r * s.x_col];
    for (int64_t r = nrhs; r < width; ++r) y[i * width + r] = T(0);
  }
}

template <class T>
void unpack(const LowerSystem& s, int64_t n, int64_t nrhs, const T* y, int64_t width, T* x) {
  for (int64_t i = 0; i < n; ++i) {
    T* row = x + s.x_start + i * s.x_row;
    for (int64_t r = 0; r < nrhs; ++r) row[r * s.x_col] = y[i * width + r];
  }
}

// C C^H X = B (lower) or C^H C X = B, on the packed right-hand sides: the two substitutions run in
// opposite directions, so Y is turned around between and after them.
template <class T>
void reverse_rows(int64_t n, int64_t width, T* y) {
  for (int64_t i = 0, k = n - 1; i < k; ++i, --k) {
    for (int64_t r = 0; r < width; ++r) {
      const T t = y[i * width + r];
      y[i * width + r] = y[k * width + r];
      y[k * width + r] = t;
    }
  }
}

template <class T>
void solve_with_factor(const T* c, bool lower, int64_t n, int64_t nrhs, const T* b, T* x, T* y) {
  const int64_t width = packed_columns<T>(nrhs);
  const LowerSystem first = lower_system(n, nrhs, true, lower, !lower, !lower);
  const LowerSystem second = lower_system(n, nrhs, true, lower, lower, lower);
  pack(first, n, nrhs, b, width, y);
  substitute(first, c, n, false, width, y);
  reverse_rows(n, width, y);
  substitute(second, c, n, false, width, y);
  unpack(second, n, nrhs, y, width, x);
}

}  // namespace jax_batched::cpu::JAX_BATCHED_ISA
