"""The example of an optimizer: blocks against SciPy, and a small run of all of it."""

import jax.numpy as jnp
import numpy as np
import optimizer as example
import pytest
import scipy.linalg


def test_blocks_lead_there_and_back():
    rng = np.random.default_rng(0)
    tree = [rng.standard_normal(shape).astype(np.float32) for shape in ((64, 40), (7, 100))]
    blocks = example.to_blocks(tree)
    assert blocks.shape == (2 * 2 + 1 * 4, 32, 32)
    np.testing.assert_array_equal(blocks[1, :, :8], tree[0][:32, 32:])
    for matrix, back in zip(tree, example.from_blocks(blocks, tree), strict=True):
        np.testing.assert_array_equal(back, matrix)


@pytest.mark.parametrize("roots", ["inverse_fourth_root", "stock_roots"])
def test_preconditioner_against_matrix_powers(roots):
    rng = np.random.default_rng(1)
    gradients = [rng.standard_normal((3, 64, 20)), rng.standard_normal((3, 33, 32))]
    transform = example.scale_by_shampoo(getattr(example, roots))
    tree = [jnp.asarray(g[0]) for g in gradients]
    state = transform.init(tree)
    for k in range(3):
        tree = [jnp.asarray(g[k]) for g in gradients]
        updates, state = transform.update(tree, state)

    def expected(history):
        n = example.BLOCK
        padded = [np.pad(g, [(0, n - g.shape[0]), (0, n - g.shape[1])]) for g in history]
        sides = np.zeros((2, n, n))
        for g in padded:
            squares = np.stack([g @ g.T, g.T @ g])
            sides = example.DECAY * sides + (1 - example.DECAY) * squares
        left, right = (
            scipy.linalg.fractional_matrix_power(side + example.EPSILON * np.eye(n), -0.25)
            for side in sides
        )
        return left @ padded[-1] @ right

    np.testing.assert_allclose(updates[0][32:], expected(gradients[0][:, 32:])[:, :20], atol=1e-9)
    np.testing.assert_allclose(updates[1][32:], expected(gradients[1][:, 32:])[:1], atol=1e-9)


def test_small_run(tmp_path, capsys):
    picture = tmp_path / "optimizer.png"
    example.main(["--steps", "25", "--rates", "0.003", "--output", str(picture)])
    assert picture.stat().st_size > 10_000
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines() if "│" in line]
    table = {row[1].strip(): row[2].strip() for row in rows}
    images = example.load_digits()[0]
    variance = float(jnp.mean(jnp.sum(images**2, axis=-1)))
    assert variance == pytest.approx(4.68, abs=0.01)
    assert float(table["loss, Shampoo, rate 0.003"]) < 0.45 * variance
    assert float(table["loss, Adam, rate 0.003"]) < 0.45 * variance
