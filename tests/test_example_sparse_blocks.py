"""The example of block preconditioners, on a small matrix of the package."""

import numpy as np
import sparse_blocks as example


def test_blocks_save_steps_and_the_picture_is_drawn(tmp_path, capsys):
    matrix, groups = example.problem("airfoil")
    assert sorted(np.concatenate(groups)) == list(range(matrix.shape[0]))
    assert len({len(group) for group in groups}) > 2
    example.COPIES = 1
    picture = tmp_path / "sparse_blocks.png"
    example.main(["--matrix", "airfoil", "--output", str(picture)])
    assert picture.stat().st_size > 10_000
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    plain, preconditioned = (line for line in lines if "steps," in line)
    assert int(preconditioned[2]) < 0.8 * int(plain[1])
    assert all(float(line[-1]) < 10 * example.TOLERANCE for line in (plain, preconditioned))
