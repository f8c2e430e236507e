"""What is shown while kernels are measured."""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A function that shows one more step done: a bar with rich, else a line each 5 %."""
    if importlib.util.find_spec("rich") is not None:
        bars = importlib.import_module("rich.progress")
        columns = (
            bars.BarColumn(),
            bars.MofNCompleteColumn(),
            bars.TimeRemainingColumn(),
            bars.TextColumn("{task.description}"),
        )
        with bars.Progress(*columns) as bar:
            task = bar.add_task("", total=total)
            yield lambda text: bar.update(task, advance=1, description=text)
        return
    done = 0

    def step(text: str) -> None:
        nonlocal done
        done += 1
        if done * 20 // total != (done - 1) * 20 // total:
            print(f"{done}/{total}  {text}", flush=True)

    yield step
