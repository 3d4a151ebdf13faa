"""Many jobs as processes of their own, fast: a server that has imported everything forks one child per job.

A test may kill a child at any time, have it die at its n-th file operation, or limit the size of its files.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import signal
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE_OPERATIONS = ("open", "pwrite", "fsync", "ftruncate", "replace", "unlink", "rmdir", "mkdir")


class JobServer:
    """Client side. Start jobs one after the other."""

    def __init__(self) -> None:
        command = [sys.executable, __file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    def start(self, directory: Path, *arguments: str, delay_ms: float = 0, die_at: int = 0, file_limit: int = 0) -> RunningJob:
        """Begin a job in a directory. die_at: SIGKILL in the n-th file operation. file_limit: bytes. 0 for neither."""
        order = {"cwd": str(directory), "arguments": arguments, "delay_ms": delay_ms, "die_at": die_at, "file_limit": file_limit}
        self._send(order)
        return RunningJob(self, directory, self.receive()["pid"])

    def run(self, directory: Path, *arguments: str, **how: Any) -> int:
        """Run a job to its end; returns its exit code, or minus the signal that killed it."""
        return self.start(directory, *arguments, **how).wait()

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


@dataclass
class RunningJob:
    """A job under way."""

    server: JobServer
    directory: Path
    pid: int

    def signal(self, number: int) -> None:
        """Send a signal; the server reaps the child only when it is asked to, so the process id stays the job's."""
        os.kill(self.pid, number)

    def wait(self) -> int:
        self.server._send({"wait": self.pid})
        return int(self.server.receive()["code"])

    @property
    def stderr(self) -> str:
        return (self.directory / "stderr.txt").read_text()


def die_at_operation(number: int) -> None:
    """Kill this process at its n-th file operation; a write is then half done."""
    count = 0

    def wrap(name: str) -> Any:
        real = getattr(os, name)

        def operation(*arguments: Any, **keywords: Any) -> Any:
            nonlocal count
            count += 1
            if count == number:
                if name == "pwrite":
                    fd, data, offset = arguments
                    real(fd, bytes(data)[: len(data) // 2], offset)
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **keywords)

        return operation

    for name in FILE_OPERATIONS:
        setattr(os, name, wrap(name))


def run_child(order: dict[str, Any]) -> int:
    """One job, in the forked child."""
    from standin_engine import load_standin, load_standin_builder
    from standin_job import run_standin

    from dspark.runtime.jobs.job import Loaders

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):  # tests may run where a shell has some ignored, which jobs respect
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.chdir(order["cwd"])
    os.environ["XDG_STATE_HOME"] = order["cwd"]  # where the log of a bug goes
    for fd, name in ((1, "stdout.txt"), (2, "stderr.txt")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), fd)
    if order["file_limit"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (order["file_limit"], order["file_limit"]))
    if order["die_at"]:
        die_at_operation(order["die_at"])
    return run_standin(list(order["arguments"]), Loaders(load_standin(order["delay_ms"] / 1000), load_standin_builder))


def serve() -> None:
    """Server side: one order per line of stdin."""
    # A job that fails at once imports here what the children need, lazy imports of the libraries among it.
    from standin_engine import load_standin, load_standin_builder
    from standin_job import run_standin

    import dspark.runtime.jobs.prompts  # noqa: F401
    from dspark.runtime.jobs.job import Loaders

    with contextlib.redirect_stderr(io.StringIO()):
        run_standin(["no-such-input", "out", "--engine", "none"], Loaders(load_standin(), load_standin_builder))
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            status = os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1])
            print(json.dumps({"code": status}), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            code = 99
            try:
                code = run_child(order)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        print(json.dumps({"pid": pid}), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    serve()
