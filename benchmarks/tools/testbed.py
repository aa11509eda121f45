"""Makes N hosts on one machine, joined by links of a chosen rate, runs ranks on each, and collects their results.

    python benchmarks/tools/testbed.py --hosts 2 --rate 1gbit -- script.py --its arguments

A host is a network namespace with one interface, eth0: a veth whose other end is a port of a bridge, which has a
namespace of its own, so that nothing here touches the machine's own network. Both ends of each link are shaped with
``tc tbf``: the host's end limits what it sends, the bridge's end what it receives.

What always holds: after `Testbed.__exit__`, no process and no namespace of the run is left, whether it succeeded,
failed, timed out or was interrupted. The next run removes what a killed run left behind. A namespace's name contains
the process that made it, so concurrent runs do not disturb each other.

Needs root, iproute2 (ip, tc), and a kernel with veth, bridge and tbf. ``--rate loopback`` needs none of these: the
ranks are then plain processes on 127.0.0.1, and nothing is shaped or counted.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any

PREFIX = "ddphooks"
INTERFACE = "eth0"
LOOPBACK = "loopback"
# When a rank fails, the others may go on this long: their own errors are worth having, their hang is not.
GRACE_SECONDS = 5.0
# A rank that is told to die prints its stack first (faulthandler); this is how long it has for that.
STACK_SECONDS = 2.0
_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}


class TestbedUnavailable(RuntimeError):
    """The testbed cannot run here; the message says what is missing."""

    __test__ = False  # the name is not a pytest class


class RankFailed(RuntimeError):
    """A rank failed or the run hung; the message holds the last output of every rank, tracebacks included."""


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast a link is, and the token bucket that makes it so."""

    text: str
    bits_per_second: float | None  # None: not shaped

    @classmethod
    def parse(cls, text: str) -> Rate:
        text = text.strip().lower()
        if text in ("none", LOOPBACK):
            return cls(text, None)
        match = re.fullmatch(r"([0-9.]+)\s*([kmgt]?bit)(?:/s)?", text)
        if not match:
            raise ValueError(f"expected a rate like 1gbit, 250mbit, none or {LOOPBACK}, received {text!r}")
        return cls(text, float(match[1]) * _UNITS[match[2]])

    @property
    def burst_bytes(self) -> int:
        """The depth of the token bucket: what may leave at once after a pause.

        It must hold a whole segmentation-offload packet (64 KiB plus the headers of its 45 segments), or tbf cuts
        each one up in software and loses a core to it. It must also cover what the link carries between two wake-ups
        of the shaper, or the rate is not reached; but all of it leaves unshaped after a pause, so more of it flatters
        small messages. 0.2 ms of the link's rate was enough at 10 Gbit/s.
        """
        assert self.bits_per_second is not None
        return max(128 * 1024, int(self.bits_per_second / 8 * 0.0002))

    @property
    def queue_bytes(self) -> int:
        """What waits in a port before packets are dropped: 10 ms of the rate, as a shallow switch buffer would."""
        assert self.bits_per_second is not None
        return self.burst_bytes + max(512 * 1024, int(self.bits_per_second / 8 * 0.010))

    def qdisc(self) -> list[str]:
        assert self.bits_per_second is not None
        rate = f"{self.bits_per_second:.0f}bit"
        return ["tbf", "rate", rate, "burst", f"{self.burst_bytes}b", "limit", f"{self.queue_bytes}b"]


@dataclass(frozen=True, slots=True)
class Counters:
    """What an interface has sent and received since it was made.

    The interface counts an offloaded packet once, with one header, so it comes to about 0.1% more than the TCP
    payload. The shaper counts it as the segments that a real wire would carry, with a header each: that is what the
    rate applies to, and what the benchmarks call bytes on the wire. It is None where nothing is shaped.
    """

    tx_bytes: int
    rx_bytes: int
    tx_packets: int
    rx_packets: int
    shaped_tx_bytes: int | None = None
    dropped: int | None = None

    def __sub__(self, other: Counters) -> Counters:
        def minus(mine: int | None, theirs: int | None) -> int | None:
            return None if mine is None or theirs is None else mine - theirs

        return Counters(
            self.tx_bytes - other.tx_bytes,
            self.rx_bytes - other.rx_bytes,
            self.tx_packets - other.tx_packets,
            self.rx_packets - other.rx_packets,
            minus(self.shaped_tx_bytes, other.shaped_tx_bytes),
            minus(self.dropped, other.dropped),
        )


def read_counters(with_shaper: bool = True) -> Counters | None:
    """The counters of this rank's own link; None when the rank is not on a testbed.

    Reading the interface takes microseconds; asking the shaper starts ``tc``, which takes milliseconds.
    """
    interface = os.environ.get("DDP_HOOKS_TESTBED_INTERFACE")
    if not interface:
        return None
    folder = Path("/sys/class/net") / interface / "statistics"
    tx_bytes, rx_bytes, tx_packets, rx_packets = (
        int((folder / name).read_text()) for name in ("tx_bytes", "rx_bytes", "tx_packets", "rx_packets")
    )
    shaped = dropped = None
    if with_shaper:
        for qdisc in json.loads(_tool("tc", "-s", "-j", "qdisc", "show", "dev", interface) or "[]"):
            if qdisc.get("kind") == "tbf":
                shaped, dropped = qdisc["bytes"], qdisc["drops"]
    return Counters(tx_bytes, rx_bytes, tx_packets, rx_packets, shaped, dropped)


@dataclass(slots=True)
class RankOutcome:
    """What one rank left: its exit code, what it printed, and the JSON lines it wrote with `report`."""

    rank: int
    exit_code: int
    output: str
    results: list[Any] = field(default_factory=list)


def report(result: Any) -> None:
    """Hand a JSON-serialisable result to whoever started this rank."""
    path = os.environ.get("DDP_HOOKS_TESTBED_RESULTS")
    if path is None:
        print(json.dumps(result))
        return
    with open(path, "a") as stream:
        stream.write(json.dumps(result) + "\n")


def _tool(*argv: str, check: bool = True) -> str:
    done = subprocess.run(argv, capture_output=True, text=True)
    if check and done.returncode != 0:
        raise RuntimeError(f"`{' '.join(argv)}` failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _start_ticks(pid: int) -> str | None:
    """When a process started; together with its id this names it for good. None when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def require() -> None:
    """Raise `TestbedUnavailable` where namespaces with shaped links cannot be made."""
    if not sys.platform.startswith("linux"):
        raise TestbedUnavailable(f"the testbed needs Linux network namespaces; this is {sys.platform}")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise TestbedUnavailable(f"missing {' and '.join(missing)}: install iproute2 (apt-get install -y iproute2)")
    if os.geteuid() != 0:
        raise TestbedUnavailable("the testbed makes network namespaces and so needs root; run it with sudo")


def sweep() -> list[str]:
    """Remove what dead runs left behind, processes and namespaces; return the namespaces' names."""
    removed = []
    for line in _tool("ip", "netns", "list", check=False).splitlines():
        name = line.split()[0] if line.split() else ""
        match = re.fullmatch(rf"{PREFIX}-(\d+)-(\d+)-\d+-\w+", name)
        if match and _start_ticks(int(match[1])) != match[2]:
            _remove_namespace(name)
            removed.append(name)
    return removed


def _remove_namespace(name: str) -> None:
    for pid in _tool("ip", "netns", "pids", name, check=False).split():
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            continue
    _tool("ip", "netns", "del", name, check=False)


def _prepare_rank() -> None:
    """Runs in the child: die with the parent, even when the parent is killed outright, and dump no core."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@contextmanager
def _signals_raise() -> Iterator[None]:
    """SIGTERM and SIGHUP become KeyboardInterrupt, so that they unwind and clean up as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(f"stopped by {signal.Signals(number).name}")

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _signals_wait() -> Iterator[None]:
    """No signal interrupts the cleaning up; impatience with Ctrl-C must not leave namespaces behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Testbed:
    """Hosts and links, from `__enter__` to `__exit__`."""

    __test__ = False
    _made = 0

    def __init__(self, hosts: int, rate: str = "1gbit", ranks_per_host: int = 1) -> None:
        if not 1 <= hosts <= 200:
            raise ValueError(f"expected 1 to 200 hosts, received {hosts}")
        self.hosts = hosts
        self.ranks_per_host = ranks_per_host
        self.ranks = hosts * ranks_per_host
        self.rate = Rate.parse(rate)
        self.is_loopback = self.rate.text == LOOPBACK
        Testbed._made += 1
        self._name = f"{PREFIX}-{os.getpid()}-{_start_ticks(os.getpid())}-{Testbed._made}"
        self._namespaces: list[str] = []
        self._processes: list[subprocess.Popen[str]] = []
        self._signals: Any = None

    def __enter__(self) -> Testbed:
        if not self.is_loopback:
            require()
        self._signals = _signals_raise()
        self._signals.__enter__()
        try:
            if not self.is_loopback:
                for name in sweep():
                    print(f"testbed: removed {name}, left behind by a run that was killed", file=sys.stderr)
                self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        with _signals_wait():
            self._kill()
            for name in reversed(self._namespaces):
                _remove_namespace(name)
            self._namespaces.clear()
        if self._signals is not None:
            self._signals.__exit__(None, None, None)
            self._signals = None

    def host_address(self, host: int) -> str:
        return "127.0.0.1" if self.is_loopback else f"10.77.0.{host + 1}"

    def _namespace(self, role: str) -> str:
        name = f"{self._name}-{role}"
        self._namespaces.append(name)  # before it exists: an interrupt in between must not lose it
        _tool("ip", "netns", "add", name)
        _tool("ip", "-n", name, "link", "set", "lo", "up")
        return name

    def _make(self) -> None:
        switch = self._namespace("switch")
        try:
            _tool("ip", "-n", switch, "link", "add", "bridge", "type", "bridge", "stp_state", "0", "forward_delay", "0")
        except RuntimeError as error:
            raise TestbedUnavailable(f"this kernel makes no bridge: {error}") from error
        _tool("ip", "-n", switch, "link", "set", "bridge", "up")
        for number in range(self.hosts):
            host = self._namespace(f"h{number}")
            port = f"port{number}"
            peer = ["peer", "name", port, "netns", switch]
            _tool("ip", "-n", host, "link", "add", INTERFACE, "type", "veth", *peer)
            _tool("ip", "-n", host, "address", "add", f"{self.host_address(number)}/24", "dev", INTERFACE)
            _tool("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
            _tool("ip", "-n", host, "link", "set", INTERFACE, "up")
            if self.rate.bits_per_second is not None:
                for namespace, end in ((host, INTERFACE), (switch, port)):
                    try:
                        _tool("tc", "-n", namespace, "qdisc", "replace", "dev", end, "root", *self.rate.qdisc())
                    except RuntimeError as error:
                        raise TestbedUnavailable(f"this kernel cannot shape a link with tbf: {error}") from error

    def run(
        self,
        argv: Sequence[str],
        timeout_seconds: float = 600.0,
        echo_rank: int | None = 0,
        environment: dict[str, str] | None = None,
    ) -> list[RankOutcome]:
        """Run ``python *argv`` once for every rank; return what each rank left, in rank order.

        Args:
            argv: a script and its arguments; every rank gets the same, and RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR,
                MASTER_PORT, GLOO_SOCKET_IFNAME and OMP_NUM_THREADS=1 in its environment.
            timeout_seconds: after this long, every rank prints its stacks and is killed.
            echo_rank: whose output is shown while it runs.
            environment: further variables.

        Raises:
            RankFailed: a rank exited with another code than 0, or the time was over.
        """
        with tempfile.TemporaryDirectory(prefix=f"{PREFIX}-") as folder:
            outputs: list[list[str]] = [[] for _ in range(self.ranks)]
            readers = []
            for rank in range(self.ranks):
                process = subprocess.Popen(
                    [*self._enter_host(rank), sys.executable, *argv],
                    env=self._environment(rank, Path(folder), environment or {}),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    start_new_session=True,  # Ctrl-C reaches us alone; we decide how the ranks end
                    preexec_fn=_prepare_rank,
                )
                self._processes.append(process)
                assert process.stdout is not None
                reader = threading.Thread(
                    target=_read, args=(process.stdout, outputs[rank], rank == echo_rank), daemon=True
                )
                reader.start()
                readers.append(reader)
            timed_out = self._wait(timeout_seconds)
            alive = [process.poll() is None for process in self._processes]
            if any(alive):
                self._print_stacks()
            codes = [process.poll() for process in self._processes]
            self._kill()
            for reader in readers:
                reader.join(2)
            if timed_out or any(alive) or any(codes):
                raise RankFailed(_describe(outputs, codes, alive, timeout_seconds if timed_out else None))
            outcomes = []
            for rank in range(self.ranks):
                path = Path(folder) / f"rank{rank}.jsonl"
                lines = path.read_text().splitlines() if path.exists() else []
                outcomes.append(RankOutcome(rank, 0, "".join(outputs[rank]), [json.loads(line) for line in lines]))
            return outcomes

    def _enter_host(self, rank: int) -> list[str]:
        # `ip netns exec` also gives the rank a /sys of its namespace, which is where the counters are read.
        return [] if self.is_loopback else ["ip", "netns", "exec", f"{self._name}-h{rank // self.ranks_per_host}"]

    def _environment(self, rank: int, folder: Path, more: dict[str, str]) -> dict[str, str]:
        port = free_port() if self.is_loopback and rank == 0 else None
        if port is not None:
            self._port = port
        values = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % self.ranks_per_host),
            "LOCAL_WORLD_SIZE": str(self.ranks_per_host),
            "WORLD_SIZE": str(self.ranks),
            "MASTER_ADDR": self.host_address(0),
            "MASTER_PORT": str(self._port if self.is_loopback else 29500),
            "GLOO_SOCKET_IFNAME": "lo" if self.is_loopback else INTERFACE,
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",  # SIGABRT then prints the stacks of all threads
            "DDP_HOOKS_TESTBED_RATE": self.rate.text,
            "DDP_HOOKS_TESTBED_RESULTS": str(folder / f"rank{rank}.jsonl"),
        }
        if not self.is_loopback:
            values["DDP_HOOKS_TESTBED_INTERFACE"] = INTERFACE
        if self.rate.bits_per_second is not None:
            # The interface does not know that its link is shaped, and says 10 Gbit/s.
            values["DDP_HOOKS_LINK_MBITS"] = str(round(self.rate.bits_per_second / 1e6))
        return {**os.environ, **values, **more}

    def _wait(self, timeout_seconds: float) -> bool:
        """Wait until all ranks are done, or one failed and its grace is over. True when the time ran out."""
        deadline = time.monotonic() + timeout_seconds
        grace_ends = None
        while True:
            codes = [process.poll() for process in self._processes]
            if all(code is not None for code in codes):
                return False
            now = time.monotonic()
            if grace_ends is None and any(codes):
                grace_ends = now + GRACE_SECONDS
            if grace_ends is not None and now > grace_ends:
                return False
            if now > deadline:
                return True
            time.sleep(0.02)

    def _print_stacks(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGABRT)
        ends = time.monotonic() + STACK_SECONDS
        while time.monotonic() < ends and any(process.poll() is None for process in self._processes):
            time.sleep(0.02)

    def _kill(self) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # start_new_session: the group is the rank and its children
            process.wait()
        self._processes.clear()


def free_port() -> int:
    """Return a free port: none of those that connections are given, or one may have it before it is used."""
    import random
    import socket

    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("expected a free port from 20000 to 31999, found none among 100")


def _read(stream: IO[str], lines: list[str], echo: bool) -> None:
    for line in stream:
        lines.append(line)
        if echo:
            sys.stderr.write(line)
            sys.stderr.flush()


def _describe(
    outputs: list[list[str]], codes: Sequence[int | None], alive: list[bool], timeout_seconds: float | None
) -> str:
    why = "a rank failed" if timeout_seconds is None else f"not done after {timeout_seconds:g} seconds"
    parts = [why]
    for rank, lines in enumerate(outputs):
        state = "was still running; its stacks are in its output" if alive[rank] else f"exit code {codes[rank]}"
        parts.append(f"--- rank {rank}: {state}\n{''.join(lines[-80:])}")
    return "\n".join(parts)


def launch(
    argv: Sequence[str],
    hosts: int,
    rate: str,
    timeout_seconds: float = 600.0,
    echo_rank: int | None = 0,
    ranks_per_host: int = 1,
) -> list[RankOutcome]:
    """Make a testbed, run one command on it, and take it down."""
    with Testbed(hosts, rate, ranks_per_host) as bed:
        return bed.run(argv, timeout_seconds, echo_rank)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--rate", default="1gbit", help=f"of each link and direction: 1gbit, 250mbit, none, {LOOPBACK}")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds")
    parser.add_argument("--sweep", action="store_true", help="only remove what killed runs left behind")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- script.py arguments, run by this Python")
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    try:
        if options.sweep:
            require()
            print("\n".join(sweep()) or "nothing to remove")
            return 0
        if not command:
            parser.error("which script should the ranks run? e.g. -- benchmarks/link_check.py")
        for outcome in launch(
            command, options.hosts, options.rate, options.timeout, ranks_per_host=options.ranks_per_host
        ):
            for result in outcome.results:
                print(json.dumps(result))
    except TestbedUnavailable as error:
        print(f"testbed: cannot run here: {error}", file=sys.stderr)
        return 69  # EX_UNAVAILABLE
    except RankFailed as error:
        print(f"testbed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        print(f"testbed: interrupted {error}".rstrip(), file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
