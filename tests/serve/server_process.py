"""`python -m jaxllm.serve` as a child of the tests."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

# Kept between runs: compiling takes most of a start.
CACHE = Path(tempfile.gettempdir()) / "jaxllm-test-compilation"
START_S = 120.0
# The same for all, so that a step is compiled once only.
COMMON_FLAGS = (
    *("--max-num-seqs", "8", "--max-num-batched-tokens", "32"),
    *("--num-gpu-blocks-override", "128"),
)


class ServerProcess:
    """A running server; its output goes to a file.

    Args:
        wait: whether to wait until it is ready.
        devices: virtual ones that it sees.
    """

    def __init__(self, log: Path, *arguments: str, wait: bool = True, devices: int = 1) -> None:
        self.log = log
        command = [sys.executable, "-m", "jaxllm.serve", *arguments]
        if "--port" not in arguments:
            command += ["--port", "0", "--host", "127.0.0.1"]
        command += ["--compilation-cache-dir", str(CACHE)]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=environment
            )
        self.url = ""
        if wait:
            self.url = self.wait_for(r"Ready: .* at (http://\S+)")

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, pattern: str, timeout_s: float = START_S) -> str:
        """The first group of `pattern`, once it is in the output."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            match = re.search(pattern, self.output)
            if match is not None:
                return match[1] if match.re.groups else match[0]
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        raise AssertionError(f"{pattern!r} did not come:\n{self.output}")

    def wait_exit(self, timeout_s: float = 30.0) -> int:
        return self.process.wait(timeout_s)

    def engine_pid(self) -> int:
        """Of the child that runs the engine: the one spawned, beside the resource tracker."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        for pid in children.split():
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return int(pid)
        raise AssertionError("no engine process")

    def metric(self, name: str) -> float:
        """The value of a metric without further labels than the model."""
        text = httpx.get(self.url + "/metrics").text
        match = re.search(rf"^jaxllm:{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE)
        assert match is not None, name
        return float(match[1])

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False
