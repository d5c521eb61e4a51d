"""Several "hosts" on one machine: network namespaces with their own address, hostname, /etc/hosts and sshd, joined by a
bridge whose links can be cut and slowed down. Slurm and Open MPI over them on demand. Needs root.

    with Hosts(tmp_path, 3) as hosts:
        hosts[0].run(["ssh-like", "command"])            # on h0
        hosts.ssh                                        # a program to be used in place of ssh; `h1` is a host
        hosts.cut(1); hosts.heal(1); hosts.limit(1, "100mbit")
        hosts[0].run(["srun", "-N3", "hostname"], env=hosts.slurm())
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PATIENCE = 60.0
BASICS = ("ip", "nsenter", "unshare", "sshd", "ssh", "ssh-keygen")
SLURM = ("slurmctld", "slurmd", "srun", "sinfo", "munged")
MPI = ("mpirun",)
INSTALL = (
    "apt-get install -y --no-install-recommends iproute2 util-linux openssh-server openssh-client "
    "slurmctld slurmd slurm-client munge openmpi-bin"
)

_made = itertools.count()


def why_not(*programs: str) -> str | None:
    """Why hosts cannot be made here, or None."""
    if os.geteuid() != 0:
        return "several hosts on one machine need root"
    missing = [name for name in (*BASICS, *programs) if _program(name) is None]
    if missing:
        return f"several hosts on one machine need {', '.join(missing)}: {INSTALL}"
    probe = subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], capture_output=True, text=True)
    return f"no network namespaces here: {probe.stderr.strip()}" if probe.returncode else None


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


@dataclass(frozen=True)
class Host:
    name: str
    address: str
    namespace: str
    hosts_file: Path

    def command(self, command: Sequence[str]) -> list[str]:
        """`command` as it is to be started on this machine so that it runs on this host."""
        # nsenter, not `ip netns exec`: that one remounts /sys, and slurmd dies of it.
        enter = f'hostname {self.name}; mount --bind "$0" /etc/hosts; exec "$@"'
        spaces = ["nsenter", f"--net=/run/netns/{self.namespace}", "unshare", "--uts", "--mount"]
        return [*spaces, "sh", "-c", enter, str(self.hosts_file), *command]

    def run(
        self, command: Sequence[str], env: Mapping[str, str] | None = None, timeout: float = PATIENCE
    ) -> subprocess.CompletedProcess[str]:
        """Run to the end; the caller looks at returncode, stdout and stderr."""
        merged = {**os.environ, **(env or {})}
        return subprocess.run(self.command(command), env=merged, capture_output=True, text=True, timeout=timeout)

    def start(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        merged = {**os.environ, **(env or {})}
        pipes = subprocess.PIPE
        return subprocess.Popen(self.command(command), env=merged, stdout=pipes, stderr=pipes, text=True)


class Started:
    """What a test has started on hosts; ended with it."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[str]] = []

    def keep(self, process: subprocess.Popen[str]) -> subprocess.Popen[str]:
        self._processes.append(process)
        return process

    def close(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.communicate()


def outcome(*processes: subprocess.Popen[str], timeout: float = 240.0) -> list[tuple[int, str, str]]:
    """(exit code, standard output, standard error) of each."""
    said = [process.communicate(timeout=timeout) for process in processes]
    return [(process.returncode, *each) for process, each in zip(processes, said, strict=True)]


def curve(output: str) -> list[float]:
    """The losses that examples/train.py has printed."""
    return [float(loss) for loss in re.findall(r"epoch \d+  loss (\S+)", output)]


class Hosts:
    def __init__(self, base: Path, count: int = 3) -> None:
        self.base = base
        self.prefix = f"ud{os.getpid()}x{next(_made)}"  # two test runs at once do not meet
        self._switch = f"{self.prefix}sw"
        self._env: dict[str, str] | None = None  # Slurm's, once it runs
        self._hosts = [Host(f"h{i}", f"10.77.0.{i + 1}", f"{self.prefix}h{i}", base / "hosts") for i in range(count)]

    def __getitem__(self, index: int) -> Host:
        return self._hosts[index]

    def __len__(self) -> int:
        return len(self._hosts)

    def __enter__(self) -> Hosts:
        _end_what_dead_runs_left()
        try:
            self._network()
            self._sshd()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the network -------------------------------------------------------------------------------------------

    def _network(self) -> None:
        rows = ["127.0.0.1 localhost", *(f"{host.address} {host.name}" for host in self._hosts)]
        (self.base / "hosts").write_text("\n".join(rows) + "\n")
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "br0", "up")
        for i, host in enumerate(self._hosts):
            _ip("netns", "add", host.namespace)
            _ip("-n", host.namespace, "link", "set", "lo", "up")
            pair = ("type", "veth", "peer", "name", f"p{i}", "netns", self._switch)
            _ip("link", "add", "eth0", "netns", host.namespace, *pair)
            _ip("-n", self._switch, "link", "set", f"p{i}", "master", "br0", "up")
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
            _ip("-n", host.namespace, "link", "set", "eth0", "up")

    def cut(self, index: int) -> None:
        """Pull the host's network cable. What runs there goes on running."""
        _ip("-n", self._switch, "link", "set", f"p{index}", "down")

    def heal(self, index: int) -> None:
        _ip("-n", self._switch, "link", "set", f"p{index}", "up")

    def limit(self, index: int, rate: str | None) -> None:
        """What the host sends is held to `rate`, such as "100mbit"; None lifts it."""
        subprocess.run(self[index].command(["tc", "qdisc", "del", "dev", "eth0", "root"]), capture_output=True)
        if rate:
            shape = ["tbf", "rate", rate, "burst", "64kb", "latency", "400ms"]
            _check(self[index].command(["tc", "qdisc", "add", "dev", "eth0", "root", *shape]))

    # -- ssh ---------------------------------------------------------------------------------------------------

    @property
    def ssh(self) -> str:
        """A program that takes ssh's arguments and reaches the hosts by name, from any of them."""
        return str(self.base / "ssh" / "ssh")

    def _sshd(self) -> None:
        place = self.base / "ssh"
        place.mkdir()
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd insists
        for name in ("id", "hostkey"):
            _check(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(place / name)])
        shutil.copy(place / "id.pub", place / "authorized_keys")
        server = {
            "Port": "2222",
            "HostKey": place / "hostkey",
            "AuthorizedKeysFile": place / "authorized_keys",
            "PermitRootLogin": "prohibit-password",
            "PasswordAuthentication": "no",
            "KbdInteractiveAuthentication": "no",
            "UsePAM": "no",
            "StrictModes": "no",
            "UseDNS": "no",
        }
        client = {
            "Port": "2222",
            "User": "root",
            "IdentityFile": place / "id",
            "IdentitiesOnly": "yes",
            "StrictHostKeyChecking": "no",
            "UserKnownHostsFile": "/dev/null",
            "LogLevel": "ERROR",
        }
        (place / "sshd_config").write_text("".join(f'{name} "{value}"\n' for name, value in server.items()))
        (place / "config").write_text("Host *\n" + "".join(f'  {name} "{value}"\n' for name, value in client.items()))
        (place / "ssh").write_text(f'#!/bin/sh\nexec {_program("ssh")} -F "{place}/config" "$@"\n')
        (place / "ssh").chmod(0o755)
        for host in self._hosts:
            files = ["-f", str(place / "sshd_config"), "-E", str(place / f"{host.name}.log")]
            _check(host.command([str(_program("sshd")), *files, "-o", f'PidFile="{place / host.name}.pid"']))

    # -- Slurm and Open MPI --------------------------------------------------------------------------------------

    def slurm(self) -> dict[str, str]:
        """Start Slurm over the hosts, once, and give the variables with which srun and sbatch find it."""
        if self._env is not None:
            return self._env
        place, munge = self.base / "slurm", self.base / "munge"
        (place / "state").mkdir(parents=True)
        munge.mkdir()
        for path in (self.base, munge):
            path.chmod(0o755)
        (munge / "key").write_bytes(os.urandom(1024))
        (munge / "key").chmod(0o600)
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "seed-file": "seed", "log-file": "log"}
        _check(["munged", "--force", *(f"--{option}={munge / name}" for option, name in files.items())])
        (place / "slurm.conf").write_text(self._slurm_conf(place, munge))
        env = {"SLURM_CONF": str(place / "slurm.conf")}
        _check(self[0].command(["slurmctld", "-f", env["SLURM_CONF"]]), env)
        for host in self._hosts:
            (place / f"spool_{host.name}").mkdir()
            _check(host.command(["slurmd", "-N", host.name, "-f", env["SLURM_CONF"]]), env)
        until = time.monotonic() + PATIENCE
        while self[0].run(["sinfo", "-h", "-o", "%T %D"], env).stdout.strip() != f"idle {len(self)}":
            if time.monotonic() > until:
                raise TimeoutError(f"Slurm did not come up; see {place}/*.log")
            time.sleep(0.1)
        self._env = env
        return env

    def _slurm_conf(self, place: Path, munge: Path) -> str:
        nodes = "\n".join(
            f"NodeName={h.name} NodeAddr={h.address} CPUs=4 RealMemory=2000 State=UNKNOWN" for h in self._hosts
        )
        return f"""\
ClusterName=unidist
SlurmctldHost=h0({self[0].address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={munge}/socket
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool_%n
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd_%n.pid
SlurmctldLogFile={place}/slurmctld.log
SlurmdLogFile={place}/slurmd_%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
KillWait=2
InactiveLimit=0
SlurmdParameters=config_overrides
{nodes}
PartitionName=debug Nodes=h[0-{len(self) - 1}] Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
"""

    def mpirun(self, slots: int = 1) -> list[str]:
        """The beginning of an mpirun command over all hosts, `slots` processes on each."""
        where = ",".join(f"{host.name}:{slots}" for host in self._hosts)
        agent = ["--mca", "plm_rsh_agent", self.ssh, "--mca", "btl_tcp_if_include", "eth0"]
        return ["mpirun", "--allow-run-as-root", "--oversubscribe", *agent, "--host", where]

    # -- the end -----------------------------------------------------------------------------------------------

    def processes(self) -> set[str]:
        """The numbers of all that run on the hosts, daemons included."""
        return {pid for host in self._hosts for pid in _ip("netns", "pids", host.namespace).split()}

    def close(self) -> None:
        """End every process on every host, and the hosts."""
        for file in [*self.base.glob("slurm/*.pid"), *self.base.glob("ssh/*.pid"), self.base / "munge" / "pid"]:
            with contextlib.suppress(FileNotFoundError, ValueError, ProcessLookupError):
                os.kill(int(file.read_text()), signal.SIGTERM)
        for name in [host.namespace for host in self._hosts] + [self._switch]:
            if Path(f"/run/netns/{name}").exists():
                _end_namespace(name)
        with contextlib.suppress(FileNotFoundError, ValueError, ProcessLookupError):
            os.kill(int((self.base / "munge" / "pid").read_text()), signal.SIGKILL)


def _end_namespace(name: str) -> None:
    until = time.monotonic() + 10
    while (pids := _ip("netns", "pids", name).split()) and time.monotonic() < until:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.02)
    _ip("netns", "del", name)


def _end_what_dead_runs_left() -> None:
    """A test run that was killed could not tidy up: its hosts bear the number of its process."""
    for path in Path("/run/netns").glob("ud*x*"):
        made_by = re.fullmatch(r"ud(\d+)x\d+(h\d+|sw)", path.name)
        if made_by and not Path(f"/proc/{made_by[1]}").exists():
            with contextlib.suppress(AssertionError):  # another run is at it, too
                _end_namespace(path.name)


def _ip(*arguments: str) -> str:
    return _check(["ip", *arguments])


def _check(command: Sequence[str], env: Mapping[str, str] | None = None) -> str:
    """Run a command that must end well; its output."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    with tempfile.TemporaryFile("w+") as output:  # not a pipe: a daemon would keep it open
        ended = subprocess.run(
            list(command),
            env={**os.environ, "PATH": path, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=PATIENCE,
        )
        output.seek(0)
        text = output.read()
    if ended.returncode:
        raise RuntimeError(f"{' '.join(command)} failed ({ended.returncode}): {text}")
    return text
