jax_batched_cuda_launcher(cholesky f32 f64 c64 c128 f16 bf16)
jax_batched_cuda_launcher(cholesky_pullback f32 f64 c64 c128)
jax_batched_cuda_launcher(solve_pos f32 f64 c64 c128 f16 bf16)
