"""Tests of training with several processes: how launchers are recognised, which rows each process reads, and
that the losses equal those of one process.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import os
import pathlib
import socket
import subprocess
import sys
import time

import jax
import pytest

from lsm_jax.parallel import MeshConfig, join_hosts, launcher, make_mesh
from lsm_jax.parallel.hosts import data_shard
from tests.training import tiny


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({}, None),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "1"}, "SLURM"),
        ({"SLURM_NTASKS": "1"}, None),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "Open MPI"),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, "TPU pod"),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, None),
        ({"MEGASCALE_NUM_SLICES": "2"}, "TPU slices"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}, "Kubernetes"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),
        ({"JAX_COORDINATOR_ADDRESS": "a:1", "SLURM_NTASKS": "4"}, "JAX_COORDINATOR_ADDRESS"),
    ],
)
def test_launchers_are_known_by_their_variables(environment, name):
    assert launcher(environment) == name


def test_invalid_environments_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="SLURM_NTASKS='x'"):
        launcher({"SLURM_NTASKS": "x"})
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "localhost:1")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "two")
    with pytest.raises(ValueError, match="JAX_NUM_PROCESSES='two': it must be an integer"):
        join_hosts()


LISTENS = """
import jax, os
from lsm_jax.parallel import join_hosts
join_hosts()
print(os.getpid(), flush=True)
input()
"""


def listening(pid, port):
    """Return the local addresses at which a process listens on a port."""

    def address(hexadecimal):  # 32-bit words of the machine's byte order
        words = [hexadecimal[i : i + 8] for i in range(0, len(hexadecimal), 8)]
        parsed = ipaddress.ip_address(
            b"".join(int(w, 16).to_bytes(4, sys.byteorder) for w in words)
        )
        return str(getattr(parsed, "ipv4_mapped", None) or parsed)

    inodes = set()
    for link in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(link))
        except FileNotFoundError:
            continue
    lines = [x for n in ("tcp", "tcp6") for x in pathlib.Path(f"/proc/{pid}/net/{n}").open()]
    rows = [line.split() for line in lines if ":" in line.split()[1]]
    return {
        address(row[1].partition(":")[0])
        for row in rows
        if row[3] == "0A"
        and f"socket:[{row[9]}]" in inodes
        and int(row[1].partition(":")[2], 16) == port
    }


@pytest.mark.parametrize(("bind", "addresses"), [(None, {"127.0.0.1"}), ("[::]", {"::"})])
def test_the_coordinator_listens_at_the_given_address_only(bind, addresses):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = dict(
        JAX_COORDINATOR_ADDRESS=f"127.0.0.1:{port}", JAX_NUM_PROCESSES="1", JAX_PROCESS_ID="0"
    )
    if bind:
        variables["JAX_COORDINATOR_BIND_ADDRESS"] = f"{bind}:{port}"
    process = subprocess.Popen(
        [sys.executable, "-c", LISTENS],
        env=os.environ | variables | {"JAX_PLATFORMS": "cpu"},
        cwd=pathlib.Path(__file__).parents[2],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    pid = process.stdout.readline().strip()
    assert pid, process.communicate()[1]
    assert listening(pid, port) == addresses
    process.communicate("\n", timeout=60)


def test_an_address_without_a_port_is_refused(monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "localhost")
    with pytest.raises(ValueError, match="JAX_COORDINATOR_ADDRESS='localhost': accepted is HOST"):
        join_hosts()


def test_one_process_reads_everything():
    assert data_shard(make_mesh(MeshConfig(), jax.devices()[:1])) == (0, 1)


def run_processes(count, arguments, devices, wait=True, **environment):
    """Run `count` connected JAX processes of `devices` devices each; returns their outputs, or with
    wait=False the processes.
    """
    root = pathlib.Path(__file__).parents[2]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    shared = {"JAX_COORDINATOR_ADDRESS": f"localhost:{port}", "JAX_NUM_PROCESSES": str(count)}
    processes = []
    for index in range(count):
        variables = shared | {"JAX_PROCESS_ID": str(index)} if count > 1 else {}
        count_flag = f"--xla_force_host_platform_device_count={devices}"
        flags = {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {count_flag}", "JAX_PLATFORMS": "cpu"}
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.parallel.test_hosts", *arguments],
                env=os.environ | flags | variables | environment,
                cwd=root,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )  # fmt: skip
        )
    if not wait:
        return processes
    outputs = [process.communicate(timeout=1500)[0] for process in processes]
    assert all(p.returncode == 0 for p in processes), "\n".join(outputs)
    return outputs


def rows(workdir):
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [(row["step"], row["train/loss"]) for row in map(json.loads, lines)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "stop"), [("data=1,fsdp=2,sequence=2", "5"), ("data=1,sequence=4", "0")]
)
def test_two_processes_train_as_one(tmp_path, axes, stop):
    """Two processes of two devices each train with the losses of one process of four devices.

    In the first case the processes read different rows of a batch, one of them receives a signal, and the run
    is resumed. In the second case they read the same rows, whose tokens they divide.
    """
    text = tiny.write_text(tmp_path / "text")
    one, two = tmp_path / "one", tmp_path / "two"
    run_processes(1, [str(one), str(text), axes, "0"], 4)
    run_processes(2, [str(two), str(text), axes, stop], 2)
    if stop != "0":
        stopped = rows(two)
        assert 5 <= stopped[-1][0] < 9
        run_processes(2, [str(two), str(text), axes, "0"], 2)
    assert [step for step, _ in rows(two)] == list(range(1, 13))
    for (_, a), (_, b) in zip(rows(one), rows(two), strict=True):
        assert a == pytest.approx(b, rel=1e-5)


def main() -> None:
    """Train a model of one layer in one of several connected processes; if `stop` is not 0, the first
    process gets a signal after that step.
    """
    workdir, text, axes, stop = sys.argv[1:5]
    join_hosts()
    from lsm_jax.mixers import LinearAttentionConfig, OpConfig
    from lsm_jax.models import LayerConfig
    from lsm_jax.training import train

    stops = int(stop) and jax.process_index() == 0
    mesh = MeshConfig(**{n: int(v) for n, v in (a.split("=") for a in axes.split(","))})
    config = tiny.config(text, mesh=mesh)
    layer = LayerConfig(
        mixer=LinearAttentionConfig(num_heads=2, op=OpConfig(form="recurrent")), feedforward=None
    )
    model = dict(num_layers=1, pattern="L", layers={"L": layer}, remat="none")
    config.model = dataclasses.replace(config.model, **model)
    began = time.perf_counter()
    train(config, workdir, on_report=tiny.stop_at(int(stop)) if stops else None)
    print(f"{time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
