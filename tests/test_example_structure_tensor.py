"""The example of structure tensors: a plane wave, NumPy's eigenvalues, the picture."""

import jax.numpy as jnp
import numpy as np
import structure_tensor as example

import jax_batched as jb


def test_a_plane_wave_has_its_own_direction():
    wave = np.array([0.5, 0.3, -0.4])
    points = np.moveaxis(np.indices((20, 18, 16)), 0, -1)
    w, v = example.directions(jnp.cos(points @ wave), eigh=jb.eigh)
    inner = (slice(5, -5),) * 3
    across = np.abs(np.asarray(v)[inner][..., -1] @ (wave / np.linalg.norm(wave)))
    assert across.min() > 0.999
    assert example.anisotropy(np.asarray(w))[inner].min() > 0.98


def test_means_are_those_of_logarithms():
    volume = jnp.asarray(example.load_volume()[40:60, 40:60, 8:16])
    w, v = map(np.asarray, example.directions(volume, eigh=jb.eigh))
    tensors = np.asarray(example.structure_tensors(volume), np.float64)
    x, y = np.linalg.eigh(tensors)
    means = example.smooth(
        jnp.asarray((y * np.log(x)[..., None, :]) @ np.swapaxes(y, -1, -2)), example.TENSOR_WIDTH
    )
    product = (v * np.log(w)[..., None, :]) @ np.swapaxes(v, -1, -2)
    np.testing.assert_allclose(product, means, atol=1e-4)


def test_table_and_picture(tmp_path, capsys):
    picture = tmp_path / "structure_tensor.png"
    example.main(["--slices", "3", "--output", str(picture)])
    assert picture.stat().st_size > 10_000
    rows = capsys.readouterr().out
    assert "36,864" in rows
    (difference,) = (line for line in rows.splitlines() if "stock JAX's" in line)
    assert float(difference.split("│")[-2]) < 1e-3
