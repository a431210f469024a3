"""The scripts and manifests of launch/; tests/runtime/test_start.py runs the Slurm script."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from jaxlc.runtime import launcher
from tests.launch.slurm import FAKE_SLURM

LAUNCH = Path(__file__).parents[2] / "launch"
SCRIPTS = [
    LAUNCH / "slurm" / "train.sbatch",
    LAUNCH / "plain" / "train.sh",
    *sorted(FAKE_SLURM.iterdir()),
]


def test_scripts_pass_shellcheck():
    shellcheck = Path(sys.executable).with_name("shellcheck")
    if not shellcheck.exists():
        pytest.skip("needs shellcheck: pip install -e '.[dev]'")
    done = subprocess.run([shellcheck, *SCRIPTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_plain_script_numbers_processes_and_returns_largest_status():
    code = (
        'import os, sys; print(*(v for k, v in sorted(os.environ.items()) if k.startswith("JAX_")))'
    )
    code += '; sys.exit(int(os.environ["JAX_PROCESS_ID"]))'
    command = [
        "bash",
        LAUNCH / "plain" / "train.sh",
        "2",
        "1",
        "node0",
        "2",
        sys.executable,
        "-S",
        "-c",
        code,
    ]
    environment = dict(PATH="/usr/bin:/bin", PORT="9000")
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    # address, local index, number of local processes, of all, index
    assert sorted(done.stdout.splitlines()) == ["node0:9000 0 2 4 2", "node0:9000 1 2 4 3"]
    assert done.returncode == 3


@pytest.mark.parametrize(("status", "num_starts"), [(75, 3), (142, 3), (1, 1), (2, 1), (0, 1)])
def test_plain_script_restarts_only_after_interruptions(tmp_path, status, num_starts):
    """One of two processes ends with `status`, the other with 0 or 75; at most two restarts."""
    code = f"echo start >> {tmp_path}/starts; exit $((JAX_PROCESS_ID ? {status} : {min(status, 75) // 75 * 75}))"
    command = ["bash", LAUNCH / "plain" / "train.sh", "1", "0", "node0", "2", "bash", "-c", code]
    environment = dict(PATH="/usr/bin:/bin", MAX_RESTARTS="2", RESTART_SECONDS="0")
    assert subprocess.run(command, capture_output=True, env=environment).returncode == status
    assert len((tmp_path / "starts").read_text().splitlines()) == 2 * num_starts


def test_manifests_restart_only_after_interruptions():
    """JobSet ends at the first Job that a rule for pods has failed, and restarts after other
    failures.
    """
    _, job = yaml.safe_load_all((LAUNCH / "k8s" / "job.yaml").read_text())
    job_set = yaml.safe_load((LAUNCH / "k8s" / "jobset.yaml").read_text())
    for spec in (job["spec"], job_set["spec"]["replicatedJobs"][0]["template"]["spec"]):
        (rule,) = spec["podFailurePolicy"]["rules"]
        container = spec["template"]["spec"]["containers"][0]["name"]
        statuses = dict(containerName=container, operator="NotIn", values=[75, 134, 137, 142, 143])
        assert rule == dict(action="FailJob", onExitCodes=statuses)
        assert spec["template"]["spec"]["restartPolicy"] == "Never"  # required by podFailurePolicy
    (rule,) = job_set["spec"]["failurePolicy"]["rules"]
    assert rule == dict(action="FailJobSet", onJobFailureReasons=["PodFailurePolicy"])


def test_slurm_script_restarts_only_after_interruptions(tmp_path):
    """The statuses of an error and of a success do not restart a job; nor does anything after the
    last restart.
    """
    shutil.copy(FAKE_SLURM / "scontrol", tmp_path)
    (tmp_path / "srun").write_text('#!/bin/bash\nexit "$STATUS"\n')
    (tmp_path / "srun").chmod(0o755)

    def run(status: int, **variables: str) -> str:
        environment = dict(
            PATH=f"{tmp_path}:/usr/bin:/bin", SLURM_JOB_ID="7", STATUS=str(status), **variables
        )
        done = subprocess.run(
            ["bash", LAUNCH / "slurm" / "train.sbatch", "x"],
            capture_output=True,
            text=True,
            env=environment,
        )
        assert done.returncode == status
        return done.stdout

    assert all("scontrol requeue 7" in run(status) for status in (75, 134, 137, 142, 143))
    assert not any("scontrol" in run(status) for status in (0, 1, 2))
    assert "scontrol" not in run(75, SLURM_RESTART_COUNT="3", MAX_RESTARTS="3")


@pytest.mark.parametrize(
    ("command", "status", "verbs"),
    [
        ("jaxlc train --name=train", 0, ["preflight --name=train", "train --name=train"]),
        ("jaxlc train", 2, ["preflight", "train"]),
        ("python -m jaxlc.train", 0, ["-m jaxlc.preflight", "-m jaxlc.train"]),
        ("my_program", 0, [""]),
    ],
)
def test_slurm_script_starts_training_after_preflight(tmp_path, command, status, verbs):
    """`status` is that of preflight."""
    (tmp_path / "srun").write_text(
        f'#!/bin/bash\nshift 3\necho "$*" >> {tmp_path}/starts\n[[ "$*" != *preflight* ]] || exit {status}\n'
    )
    (tmp_path / "srun").chmod(0o755)

    def run(**variables: str) -> list[str]:
        (tmp_path / "starts").unlink(missing_ok=True)
        environment = dict(PATH=f"{tmp_path}:/usr/bin:/bin", SLURM_JOB_ID="7", **variables)
        script = ["bash", LAUNCH / "slurm" / "train.sbatch", *command.split()]
        done = subprocess.run(script, capture_output=True, text=True, env=environment)
        assert done.returncode == (0 if variables else status), done.stderr
        return (tmp_path / "starts").read_text().splitlines()

    assert run() == (verbs[:1] if status else verbs)
    assert run(SKIP_PREFLIGHT="1") == verbs[-1:]


@pytest.mark.parametrize("name", ["job.yaml", "jobset.yaml"])
@pytest.mark.parametrize(("status", "verbs"), [(0, ["preflight", "train"]), (2, ["preflight"])])
def test_manifests_start_training_after_preflight(tmp_path, name, status, verbs):
    """The command of the container, with a program `jaxlc` that ends with `status`."""
    *_, manifest = yaml.safe_load_all((LAUNCH / "k8s" / name).read_text())
    job = manifest if name == "job.yaml" else manifest["spec"]["replicatedJobs"][0]["template"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    (tmp_path / "jaxlc").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/starts\nexit {status}\n')
    (tmp_path / "jaxlc").chmod(0o755)
    environment = dict(PATH=f"{tmp_path}:/usr/bin:/bin")
    assert (
        subprocess.run([*container["command"], *container["args"]], env=environment).returncode
        == status
    )
    starts = (tmp_path / "starts").read_text().splitlines()
    assert starts == [" ".join([verb, *container["args"]]) for verb in verbs]


def test_dockerfile_passes_hadolint():
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("needs hadolint: pip install -e '.[dev]', on Linux and x86-64")
    done = subprocess.run([hadolint, LAUNCH / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_dockerfile_installs_locked_requirements():
    """It copies files that exist, and its locks pin one version per Python, without an address of
    an index.
    """
    text = (LAUNCH / "Dockerfile").read_text().replace("\\\n", " ")
    copied = [
        path
        for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE)
        for path in line.split()[:-1]
    ]
    assert copied and all((LAUNCH.parent / path).exists() for path in copied)
    locks = re.findall(r"--constraint=(\S+)", text)
    assert set(locks) == {"requirements.lock", "requirements-cuda12.lock"} <= set(copied)
    lines = (LAUNCH.parent / "requirements-cuda12.lock").read_text().splitlines()
    assert all(re.fullmatch(r"[\w-]+==[\w.]+( ; .*)?", line) for line in lines)
    planned = (LAUNCH.parent / "requirements-plan.lock").read_text()
    assert {line.partition(" ;")[0] for line in planned.splitlines()} <= {
        line.partition(" ;")[0] for line in lines
    }


def test_manifests_agree_with_the_launcher(monkeypatch):
    """Index, number of processes and address of process 0, as a pod with the host name of
    Kubernetes finds them.
    """
    service, job = yaml.safe_load_all((LAUNCH / "k8s" / "job.yaml").read_text())
    job_set = yaml.safe_load((LAUNCH / "k8s" / "jobset.yaml").read_text())
    (replicated,) = job_set["spec"]["replicatedJobs"]
    set_name = f"{job_set['metadata']['name']}-{replicated['name']}-0"
    subdomain = job_set["spec"]["network"]["subdomain"]
    assert (
        service["spec"]["clusterIP"] == "None"
        and service["spec"]["selector"]["job-name"] == job["metadata"]["name"]
    )
    assert service["metadata"]["name"] == job["spec"]["template"]["spec"]["subdomain"]
    for name, domain, spec in (
        (job["metadata"]["name"], service["metadata"]["name"], job["spec"]),
        (set_name, subdomain, replicated["template"]["spec"]),
    ):
        assert (
            spec["completionMode"] == "Indexed" and spec["parallelism"] == spec["completions"] == 8
        )
        (container,) = spec["template"]["spec"]["containers"]
        environment = {variable["name"]: variable["value"] for variable in container["env"]}
        assert container["ports"] == [{"containerPort": launcher.DEFAULT_PORT}]
        full_name = f"{name}-3.{domain}.default.svc.cluster.local"
        monkeypatch.setattr(launcher.socket, "getfqdn", lambda full_name=full_name: full_name)
        launch = launcher.find(environment | dict(JOB_COMPLETION_INDEX="3"))
        assert launch[1:4] == (
            8,
            3,
            f"{name}-0.{domain}.default.svc.cluster.local:{launcher.DEFAULT_PORT}",
        )
