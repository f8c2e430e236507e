"""Fails if a CUDA kernel listed as spill-free spills, or the build is too slow or too large.

The build is for one architecture. The log is the compiler's (ptxas -v). `ffi/cuda/spill_free.txt`
holds one regular expression a line; a kernel whose demangled name matches one may not use local
memory for spills.
"""

import argparse
import re
import subprocess
import sys
import zipfile
from pathlib import Path

MAX_SECONDS = 60 * 60  # some 25 minutes on 2 cores; others are busy
# Of the module for one architecture (sm_90 in CI): now, and with all families to come. Whoever
# brings a family raises the first.
MAX_MODULE_MIB = 22
BUDGET_MIB = 25
ROOT = Path(__file__).parents[1]


def spills(log: str) -> dict[str, int]:
    """Spill-store bytes of every kernel in the log, by demangled name."""
    found = re.findall(
        r"Function properties for (\w+)\s+(?:ptxas info\s*:\s*)?\d+ bytes stack frame, "
        r"(\d+) bytes spill stores",
        log,
    )
    names = subprocess.run(
        ["c++filt"],
        input="\n".join(name for name, _ in found),
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    return {name: int(size) for name, (_, size) in zip(names, found, strict=True)}


def module_bytes(wheel: Path) -> int:
    """Size of the CUDA module in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return sum(file.file_size for file in archive.infolist() if "/_cuda." in file.filename)


def seconds(ninja_log: str) -> int:
    """How long the CUDA sources took, from the start of the first to the end of the last."""
    commands = [line.split("\t") for line in ninja_log.splitlines() if not line.startswith("#")]
    times = [(int(start), int(end)) for start, end, _, output, _ in commands if ".cu." in output]
    return (max(end for _, end in times) - min(start for start, _ in times)) // 1000


def main() -> None:
    """Checks one build."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--wheels", type=Path, required=True)
    parser.add_argument("--ninja-log", type=Path, required=True)
    arguments = parser.parse_args()

    kernels = spills(arguments.log.read_text())
    lines = (ROOT / "ffi/cuda/spill_free.txt").read_text().splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    faults = []
    for pattern in patterns:
        matching = {name: size for name, size in kernels.items() if re.search(pattern, name)}
        if not matching:
            faults.append(f"no kernel matches '{pattern}'")
        faults += [f"{name} spills {size} bytes" for name, size in matching.items() if size]
    size = max(module_bytes(wheel) for wheel in arguments.wheels.glob("*.whl")) / 2**20
    if size > MAX_MODULE_MIB:
        faults.append(f"the module has {size:.1f} MiB, more than {MAX_MODULE_MIB}")
    took = seconds(arguments.ninja_log.read_text())
    if took > MAX_SECONDS:
        faults.append(f"the build took {took} s")
    print(
        f"{len(kernels)} kernels, {took} s, module {size:.1f} MiB "
        f"(may have {MAX_MODULE_MIB}, with all that is to come {BUDGET_MIB})"
    )
    if faults:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()
