# These also take the storage formats.
set(scalars_cholesky f32 f64 c64 c128 f16 bf16)
set(scalars_solve_pos f32 f64 c64 c128 f16 bf16)
