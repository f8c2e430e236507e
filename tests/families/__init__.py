"""The table of operations: each module's `ROWS`, which `ops` collects.

A module also names the public functions that its rows call: `SQUARE` takes a square matrix and
makes up the rest, `SOLVERS` takes (a, b).
"""
