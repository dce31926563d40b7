"""A real Slurm of two nodes on one machine, for one user, with everything it keeps in one folder.

The nodes are 127.0.0.1 and 127.0.0.2, so that a node's name is an address that ranks can meet at, as on a cluster.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from getpass import getuser
from pathlib import Path

ROOT = Path(__file__).parents[2]
NODES = ("127.0.0.1", "127.0.0.2")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
# cred_expire: a requeued job waits so many seconds, else 120. The nodes claim more cores than the machine has, so
# that a job need not wait for another test's. A job on `urgent` preempts those on `main`, which get 20 s to end.
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,bf_interval=1,sched_interval=1,sched_min_interval=0
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait=5
NodeName=127.0.0.1 NodeHostname={host} NodeAddr=127.0.0.1 Port={port_1} CPUs=8 RealMemory=1000
NodeName=127.0.0.2 NodeHostname={host} NodeAddr=127.0.0.2 Port={port_2} CPUs=8 RealMemory=1000
PartitionName=main Nodes=ALL Default=YES State=UP PriorityTier=1 GraceTime=20
PartitionName=urgent Nodes=ALL State=UP PriorityTier=2
"""


def missing_programs() -> list[str]:
    """The programs of Slurm and munge that this machine lacks."""
    return [name for name in PROGRAMS if shutil.which(name, path=_search_path()) is None]


def _search_path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


class Cluster:
    """The running daemons. ``logs`` gets each job's log and a file for each of its ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.logs = folder, folder / "logs"
        for name in ("state", "logs", *(f"spool-{node}" for node in NODES)):
            (folder / name).mkdir()
        port, port_1, port_2 = _free_ports(3)
        values = {"host": socket.gethostname().split(".")[0], "user": getuser(), "folder": folder}
        conf = folder / "slurm.conf"
        conf.write_text(CONF.format(**values, port=port, port_1=port_1, port_2=port_2))
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SBATCH_"))}
        self.environment = {
            **kept,
            "PATH": _search_path(),
            "SLURM_CONF": str(conf),
            "LOGS": str(self.logs),
            "PYTHON": sys.executable,
            "OMP_NUM_THREADS": "1",
        }

    def start(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(64))
        key.chmod(0o600)
        places = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={self.folder}/munge.{suffix}" for option, suffix in places.items()]
        self.run("munged", f"--key-file={key}", *options)
        self.run("slurmctld")
        for node in NODES:
            self.run("slurmd", "-N", node)
        idle = ("sinfo", "--noheader", "--states=idle", "--format=%D")
        self.wait(lambda: self.run(*idle).strip() == "2", "two idle nodes")

    def stop(self) -> None:
        self.run("scancel", f"--user={getuser()}")
        self.wait(lambda: not self.run("squeue", "--noheader").strip(), "an empty queue")
        self.run("scontrol", "shutdown")
        self.wait(lambda: not list(self.folder.glob("slurm*.pid")), "the daemons to end")
        self.run("munged", f"--socket={self.folder}/munge.socket", "--stop")

    def run(self, *command: str, stream: str = "stdout") -> str:
        """What a command wrote to a stream; a command that fails is a failed assertion."""
        done = subprocess.run(command, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return getattr(done, stream)

    def submit(self, *arguments: str) -> str:
        """The id of a job of ``sbatch ARGUMENTS``."""
        return self.run("sbatch", "--parsable", f"--output={self.logs}/%j.log", *arguments).strip()

    def pipeline(self, *arguments: str) -> list[str]:
        """The ids of the three jobs of ``pipeline.sh ARGUMENTS``."""
        return re.findall(r"job (\d+)", self.run("recipes/slurm/pipeline.sh", *arguments, stream="stderr"))

    def field(self, job: str, name: str) -> str:
        """A field of ``scontrol show job``, such as JobState, Restarts or ExitCode."""
        return re.search(rf"\b{name}=(\S*)", self.run("scontrol", "show", "job", "--oneliner", job)).group(1)

    def finish(self, job: str, seconds: float = 120) -> str:
        """Waits until a job has ended for good; returns its state."""
        self.wait(lambda: self.field(job, "JobState") in ENDED, f"the end of job {job}", job, seconds)
        return self.field(job, "JobState")

    def wait_for_line(self, job: str, text: str, rank: int = 0) -> None:
        self.wait(lambda: text in self.rank_log(job, rank), f"{text!r} from rank {rank}", job)

    def rank_log(self, job: str, rank: int) -> str:
        path = self.logs / f"{job}_rank_{rank}.log"
        return path.read_text() if path.exists() else ""

    def report(self, job: str) -> str:
        """All that a job and its ranks printed, for a failed assertion."""
        files = [self.logs / f"{job}.log", *sorted(self.logs.glob(f"{job}_rank_*.log"))]
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in files if path.exists())

    def wait(self, condition: Callable[[], bool], what: str, job: str = "", seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited for {what}\n{self.report(job) if job else ''}"
            time.sleep(0.1)
