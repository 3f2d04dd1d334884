"""The manifests of mpi_scripts/kubernetes: what they rely on, and the schemas of the operators."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "mpi_scripts" / "kubernetes"
DOCKERFILE = (ROOT / "mpi_scripts" / "Dockerfile").read_text()
DOCUMENTS = {
    document["kind"]: document
    for name in ("mpijob.yaml", "trainjob.yaml")
    for document in yaml.safe_load_all((FOLDER / name).read_text())
}
MPI_REPLICAS = DOCUMENTS["MPIJob"]["spec"]["mpiReplicaSpecs"]
TRAIN_JOBS = {job["name"]: job["template"]["spec"] for job in DOCUMENTS["TrainingRuntime"]["spec"]["template"]["spec"]
              ["replicatedJobs"]}  # fmt: skip
LAUNCHERS = [MPI_REPLICAS["Launcher"]["template"]["spec"], TRAIN_JOBS["launcher"]["template"]["spec"]]
WORKERS = [MPI_REPLICAS["Worker"]["template"]["spec"], TRAIN_JOBS["node"]["template"]["spec"]]
CRDS = "LARGEBATCH_CRDS"
PLACES = (
    "mpijobs.yaml of github.com/kubeflow/mpi-operator (manifests/base/kubeflow.org_mpijobs.yaml), trainjobs.yaml and "
    "trainingruntimes.yaml of github.com/kubeflow/trainer (manifests/base/crds)"
)


@pytest.mark.parametrize("pod", LAUNCHERS + WORKERS, ids=["launcher", "launcher of TrainJob", "worker", "node"])
def test_a_pod_runs_a_script_of_the_image_as_its_user(pod):
    (container,) = pod["containers"]
    (command,) = container["command"]
    script = command.removeprefix(re.search(r"^WORKDIR (\S+)$", DOCKERFILE, re.MULTILINE)[1] + "/")
    assert os.access(ROOT / script, os.X_OK)
    (user,) = re.findall(r"useradd --create-home --uid (\d+) largebatch", DOCKERFILE)
    context = pod["securityContext"]
    assert context["runAsNonRoot"] and {context["runAsUser"], context["fsGroup"]} == {int(user)}
    assert pod["terminationGracePeriodSeconds"] >= 300  # for a checkpoint


@pytest.mark.parametrize("pod", WORKERS, ids=["worker", "node"])
def test_a_worker_has_shared_memory_and_is_ready_when_sshd_is(pod):
    (container,) = pod["containers"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    scripts = [(FOLDER / name).read_text() for name in ("launch.sh", "worker.sh")]
    (port,) = {re.search(r"PORT=\$\{PORT:-(\d+)\}", text)[1] for text in scripts}
    assert container["readinessProbe"]["tcpSocket"]["port"] == int(port) == container["ports"][0]["containerPort"]


def test_the_keys_are_where_the_scripts_look():
    policy = DOCUMENTS["TrainingRuntime"]["spec"]["mlPolicy"]["mpi"]
    assert DOCUMENTS["MPIJob"]["spec"]["sshAuthMountPath"] == policy["sshAuthMountPath"] == "/home/largebatch/.ssh"


def test_a_worker_whose_sshd_does_not_start_has_failed(tmp_path):
    """With code 0 its pod would be complete, and the launcher would wait for it."""
    for name in ("id_rsa", "authorized_keys", "sshd"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 3\n")
        (tmp_path / name).chmod(0o700)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "KEYS": str(tmp_path), "VENV": sys.prefix}
    done = subprocess.run([FOLDER / "worker.sh"], env=os.environ | environment, text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (1, "worker.sh: sshd ended with code 3: its lines above say why\n")


def test_exit_code_75_starts_again_and_no_other_one():
    """In an MPIJob launch.sh does it, which tests/cluster/test_pods.py runs."""
    assert DOCUMENTS["MPIJob"]["spec"]["runPolicy"]["backoffLimit"] == 0
    assert MPI_REPLICAS["Launcher"]["restartPolicy"] == "Never"
    launcher = TRAIN_JOBS["launcher"]
    ignore, fail = launcher["podFailurePolicy"]["rules"]  # the first that fits decides
    assert ignore == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert fail == {"action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": [75]}}
    assert launcher["backoffLimit"] > 0
    assert launcher["template"]["spec"]["restartPolicy"] == "Never"  # else Kubernetes refuses a podFailurePolicy


def test_the_launcher_of_a_trainjob_gets_its_arguments():
    """The operator gives them to the container "node" of the job with this label."""
    jobs = DOCUMENTS["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
    (launcher,) = [job for job in jobs if "metadata" in job["template"]]
    assert launcher["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert launcher["name"] == "launcher" and LAUNCHERS[1]["containers"][0]["name"] == "node"
    assert DOCUMENTS["TrainJob"]["spec"]["runtimeRef"]["name"] == DOCUMENTS["TrainingRuntime"]["metadata"]["name"]


OF_KUBEFLOW = {  # its model, and what it reads; it has no MPIJob, but the pods of one
    "TrainerV1alpha1TrainJob": [DOCUMENTS["TrainJob"]],
    "TrainerV1alpha1TrainingRuntime": [DOCUMENTS["TrainingRuntime"]],
    "IoK8sApiCoreV1PodTemplateSpec": [replica["template"] for replica in MPI_REPLICAS.values()],
}


@pytest.mark.parametrize("name", OF_KUBEFLOW)
def test_kubeflows_own_package_reads_it_without_a_loss(name):
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api brings it")
    for given in OF_KUBEFLOW[name]:
        assert lost(given, getattr(models, name).from_dict(given).to_dict()) == []  # it adds defaults


def lost(given: Any, found: Any, place: str = "") -> list[str]:
    """Return the places of values that are not found as they were given."""
    if isinstance(given, dict) and isinstance(found, dict):
        return [fault for key, value in given.items() for fault in lost(value, found.get(key), f"{place}/{key}")]
    if isinstance(given, list) and isinstance(found, list) and len(given) == len(found):
        return [fault for number, pair in enumerate(zip(given, found)) for fault in lost(*pair, f"{place}/{number}")]
    return [] if given == found else [place]


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_it_fits_the_published_schema(kind):
    """Fields that a schema does not have are mistakes, too: Kubernetes drops them."""
    if not os.environ.get(CRDS):
        pytest.skip(f"{CRDS} names no folder with {PLACES}")
    validators = pytest.importorskip("jsonschema")
    crd = yaml.safe_load((Path(os.environ[CRDS]) / f"{kind.lower()}s.yaml").read_text())
    versions = {version["name"]: version["schema"]["openAPIV3Schema"] for version in crd["spec"]["versions"]}
    schema = closed(versions[DOCUMENTS[kind]["apiVersion"].split("/")[1]])
    faults = [f"{'/'.join(map(str, fault.path))}: {fault.message}" for fault in
              validators.Draft202012Validator(schema).iter_errors(DOCUMENTS[kind])]  # fmt: skip
    assert faults == []


def closed(schema: Any) -> Any:
    """Return a schema of Kubernetes as one of JSON, without room for unknown fields."""
    if isinstance(schema, list):
        return [*map(closed, schema)]
    if not isinstance(schema, dict):
        return schema
    found = {key: closed(value) for key, value in schema.items()}
    if "properties" in found and not found.get("x-kubernetes-preserve-unknown-fields"):
        found.setdefault("additionalProperties", False)
    return found
