"""Benchmarks of jax_batched and its peers; see README.md beside this file."""
