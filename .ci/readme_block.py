"""Prints the n-th fenced block of README.md (from 1)."""

import re
import sys
from pathlib import Path

readme = Path(__file__).parents[1] / "README.md"
blocks = re.findall(r"^```(?:bash|sh)\n(.*?)^```", readme.read_text(), re.DOTALL | re.MULTILINE)
print(blocks[int(sys.argv[1]) - 1])
