jax_batched_cuda_launcher(residual f32 f64 c64 c128)
