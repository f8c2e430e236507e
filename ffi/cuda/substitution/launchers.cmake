jax_batched_cuda_launcher(triangular_solve f32 f64 c64 c128)
jax_batched_cuda_launcher(cho_solve f32 f64 c64 c128)
