"""Shows on stderr how far a bench is: a bar on a terminal where rich is installed, else a line per step."""

import sys
import time


class Progress:
    """with Progress(num_steps) as p: p.step("name of the step") before each step.

    Only the rank that prints makes one that is `on`.
    """

    def __init__(self, num_steps, on=True):
        self.num_steps, self.begun, self.on, self.bar = num_steps, 0, on, None

    def __enter__(self):
        self.begin = time.monotonic()
        if self.on and sys.stderr.isatty():
            try:
                from rich.console import Console
                from rich.progress import (BarColumn, MofNCompleteColumn, Progress as Bar, TextColumn,
                                           TimeElapsedColumn)
            except ImportError:
                return self
            columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(),
                       TextColumn("{task.description}"))
            # stdout is not used, because the figures may go to a file.
            self.bar = Bar(*columns, console=Console(stderr=True), redirect_stdout=sys.stdout.isatty(),
                           redirect_stderr=False)
            self.bar.start()
            self.task = self.bar.add_task("", total=self.num_steps)
        return self

    def step(self, what):
        """Mark the previous step as done and begin this one."""
        self.begun += 1
        if self.bar:
            self.bar.update(self.task, completed=self.begun - 1)
        self.show(what)

    def show(self, what):
        """Show the part of the step that runs now."""
        if self.bar:
            self.bar.update(self.task, description=what)
        elif self.on:
            print(f"[{self.begun}/{self.num_steps}, {time.monotonic() - self.begin:.0f} s] {what}",
                  file=sys.stderr, flush=True)

    def __exit__(self, *_):
        if self.bar:
            self.bar.update(self.task, completed=self.begun, description="")
            self.bar.stop()
