"""Run the stages of .ci/run and end with one list of what to mend.

Every stage runs, whatever failed before it. The failed tests of a stage run once more when the
stage has ended, one after the other and with nothing beside them. A test that fails again is
*failed*. A test that passes then is *unsteady*: something beside it made it fail. The exit code is
1 if a test failed, if a stage ended without a result, or if more than five tests are unsteady.
"""

import os
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import IO
from xml.etree import ElementTree

from sole_run import sole_run

TEST_STAGES = ("test", "chaos", "cluster-parallel", "cluster-alone")  # targets of the Makefile
RESULTS = Path("build/gate")
MAX_UNSTEADY = 5
MAX_RERUN = 20  # tests of a stage; with more failures the result is red in any case
MAX_LISTED = 20  # tests in the list at the end
MAX_WIDTH = 300  # characters of a line of it


@dataclass(kw_only=True)
class Result:
    """The duration of one test, and the first line of the error if it failed."""

    seconds: float
    outcome: str
    """passed, failed or skipped"""
    message: str = ""


@dataclass(kw_only=True)
class Stage:
    """The results of one stage."""

    name: str
    seconds: float = 0
    num_passed: int = 0
    num_skipped: int = 0
    failed: list[str] = field(default_factory=list)
    unsteady: list[str] = field(default_factory=list)
    last_lines: list[str] = field(default_factory=list)
    """of the output, if no failed test explains the exit code"""


class Gate:
    """Runs the stages and ends those that are still running at the deadline."""

    def __init__(self, max_seconds: float) -> None:
        self.deadline = time.monotonic() + max_seconds

    def run(self, installation: Future[None]) -> int:
        """Run all stages, print the list, and return the exit code.

        The tests wait until the `installation` of what they need is complete.
        """
        RESULTS.mkdir(parents=True, exist_ok=True)
        stages = []
        for target in ("check", *TEST_STAGES):
            print(f"--- {target}", flush=True)
            start = time.monotonic()
            stage = self.run_check() if target == "check" else self.run_tests(target)
            installation.result()
            stage.seconds = time.monotonic() - start
            stages.append(stage)
        print("--- result")
        for line in summary(stages):
            print(line[:MAX_WIDTH])
        is_green = not any(stage.failed for stage in stages)
        return 0 if is_green and sum(len(stage.unsteady) for stage in stages) <= MAX_UNSTEADY else 1

    def run_check(self) -> Stage:
        """Run the static checks."""
        stage = Stage(name="check")
        code, lines = self.run_make("check", "--keep-going")
        if code:
            stage.failed = [f"exit code {code}, see the lines below"]
            stage.last_lines = lines
        return stage

    def run_tests(self, target: str) -> Stage:
        """Run the tests of a stage, and those that failed once more, alone."""
        stage = Stage(name=target)
        code, lines, results = self.run_pytest(target, f"{target}.xml", "--durations=10")
        outcomes = [result.outcome for result in results.values()]
        stage.num_passed = outcomes.count("passed")
        stage.num_skipped = outcomes.count("skipped")
        failures = {name: result for name, result in results.items() if result.outcome == "failed"}
        if (code and not failures) or not results:
            stage.failed = [f"exit code {code} without a failed test, see the lines below"]
            stage.last_lines = lines[-5:]

        again: dict[str, Result] = {}
        if 0 < len(failures) <= MAX_RERUN:
            print(f"--- {target}: failed tests once more, alone: {len(failures)}", flush=True)
            options = ("--last-failed", "--last-failed-no-failures=none", "--numprocesses=0")
            again = self.run_pytest(target, f"{target}-again.xml", *options)[2]
        for name, first in failures.items():
            second = again.get(name, first)
            if second.outcome == "passed":
                stage.num_passed += 1
                seconds = f"failed in {first.seconds:.1f} s, passed alone in {second.seconds:.1f} s"
                stage.unsteady.append(f"{name} ({seconds}): {first.message}")
            else:
                stage.failed.append(f"{name}: {second.message}")
        return stage

    def run_pytest(
        self, target: str, file: str, *options: str
    ) -> tuple[int, list[str], dict[str, Result]]:
        """Run make with `options` for pytest; return also the results by the names of the tests.

        Each stage has a cache of its own, in which pytest keeps the names of the failed tests,
        because --last-failed runs all tests if it knows only of failures of another stage.
        """
        results = RESULTS / file
        results.unlink(missing_ok=True)
        words = [
            f"--junitxml={results}",
            "--override-ini=junit_family=xunit1",  # has the paths of the tests
            f"--override-ini=cache_dir={RESULTS / target}",
            *options,
        ]
        code, lines = self.run_make(target, f"PYTEST_OPTIONS={' '.join(words)}")
        return code, lines, read_results(results)

    def run_make(self, target: str, *words: str) -> tuple[int, list[str]]:
        """Run make, print its output, and return its exit code and the last lines of the output."""
        if time.monotonic() > self.deadline:
            return 1, ["was not started, because the time of all stages is over"]
        lines: deque[str] = deque(maxlen=10)
        process = subprocess.Popen(
            ["make", target, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        # A thread, because a process that a test has left behind would keep the pipe open.
        reader = Thread(target=copy_lines, args=(process.stdout, lines), daemon=True)
        reader.start()
        try:
            process.wait(max(0, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            end_group(process)
            lines.append("was ended, because the time of all stages is over")
        except KeyboardInterrupt:
            end_group(process)
            raise
        reader.join(timeout=10)
        return process.returncode, [line for line in lines if line]


def copy_lines(pipe: IO[str], lines: deque[str]) -> None:
    """Print the lines that come out of `pipe`, and keep the last of them."""
    for line in pipe:
        print(line, end="", flush=True)
        lines.append(line.rstrip())


def end_group(process: subprocess.Popen[str]) -> None:
    """Interrupt `process` and its children, so that pytest writes its results; then kill them."""
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def read_results(path: Path) -> dict[str, Result]:
    """Return the results in pytest's XML by the names of the tests, or none if it wrote no file.

    A test whose teardown failed is there twice, and is failed.
    """
    results: dict[str, Result] = {}
    if not path.exists():
        return results
    for case in ElementTree.parse(path).iter("testcase"):
        name = f"{case.get('file')}::{case.get('name')}"
        seconds = float(case.get("time") or 0)
        errors = case.findall("failure") + case.findall("error")
        if errors:
            results[name] = Result(
                seconds=seconds, outcome="failed", message=first_line_of(errors[0])
            )
        elif name not in results:
            outcome = "passed" if case.find("skipped") is None else "skipped"
            results[name] = Result(seconds=seconds, outcome=outcome)
    return results


def first_line_of(error: ElementTree.Element) -> str:
    """Return the first line of an error's message, with the exception if the message lacks it."""
    message = (error.get("message") or "no message").strip().partition("\n")[0]
    if message in ("collection failure", "internal error") and error.text:
        message += f": {error.text.strip().splitlines()[-1]}"
    return message


def summary(stages: list[Stage]) -> Iterator[str]:
    """Yield the lines of the list: seconds a stage, unsteady tests, failed tests, and the sum."""
    for stage in stages:
        counts = f"{stage.num_passed} passed, {len(stage.failed)} failed"
        rest = f"{len(stage.unsteady)} unsteady, {stage.num_skipped} skipped"
        yield f"{stage.name}: {stage.seconds:.0f} s, {counts}, {rest}"
    unsteady = [f"unsteady: {stage.name}: {test}" for stage in stages for test in stage.unsteady]
    failed = [f"failed: {stage.name}: {test}" for stage in stages for test in stage.failed]
    listed = unsteady + failed
    if len(listed) > MAX_LISTED:
        yield f"{len(listed) - MAX_LISTED} more are not listed"
    yield from listed[-MAX_LISTED:]
    for stage in stages:
        yield from (f"{stage.name} | {line}" for line in stage.last_lines)
    if len(unsteady) > MAX_UNSTEADY:
        yield f"failed: {len(unsteady)} tests are unsteady, at most {MAX_UNSTEADY} may be"
    num_passed = sum(stage.num_passed for stage in stages)
    num_skipped = sum(stage.num_skipped for stage in stages)
    yield f"{num_passed} passed, {len(failed)} failed, {num_skipped} skipped"


def install(packages: list[str]) -> None:
    """Install the Debian packages that are missing."""
    if not packages:
        return
    start = time.monotonic()
    query = ["dpkg-query", "--show", "--showformat=${Package} ${db:Status-Status}\\n"]
    done = subprocess.run([*query, *packages], capture_output=True, text=True, check=False)
    missing = [name for name in packages if f"{name} installed" not in done.stdout.splitlines()]
    apt_get = ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get"]
    commands = [
        ["dpkg", "--configure", "-a"],  # what a run that was killed had begun
        [*apt_get, "update"],
        [*apt_get, "install", "-y", "--no-install-recommends", *missing],
    ]
    for command in commands if missing else []:
        if subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode:
            sys.exit(f"error: {' '.join(command)} failed, see above")
    if missing:
        print(f"--- {len(missing)} Debian packages: {time.monotonic() - start:.0f} s", flush=True)


def main() -> int:
    """Install what is missing, run all stages, and return the exit code."""
    parser = ArgumentParser()
    parser.add_argument("--record", type=Path, required=True, help="what one run tells the next")
    parser.add_argument("--max-seconds", type=float, required=True)
    parser.add_argument("--for-check", nargs="*", default=[], help="Debian packages")
    parser.add_argument("--for-tests", nargs="*", default=[], help="installed beside the check")
    arguments = parser.parse_args()
    gate = Gate(arguments.max_seconds)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that make and pytest end as well
    with sole_run(arguments.record), ThreadPoolExecutor() as pool:
        install(arguments.for_check)
        return gate.run(pool.submit(install, arguments.for_tests))


if __name__ == "__main__":
    sys.exit(main())
