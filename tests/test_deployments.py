"""What is in docker/: manifests that Kubernetes would take, and compose files whose parts are there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from gpu_ops.spark.failures import PACKAGES
from gpu_ops.spark.settings import NAMES

pytestmark = pytest.mark.thorough

FOLDER = Path(__file__).resolve().parents[1] / "docker"
MANIFESTS = [
    pytest.param(manifest, id=f"{path.stem}-{manifest['kind']}")
    for path in sorted((FOLDER / "kubernetes").glob("*.yaml"))
    for manifest in yaml.safe_load_all(path.read_text())
]


@pytest.mark.parametrize("manifest", MANIFESTS)
@pytest.mark.parametrize("version", ["1.31", "1.36"])
def test_kubernetes_takes_it(manifest: dict[str, Any], version: str) -> None:
    if manifest["kind"] == "Pod":  # Spark gives the container its image
        (container,) = manifest["spec"]["containers"]
        assert "image" not in container
        manifest = {**manifest, "metadata": {**manifest["metadata"], "name": "executor"}}
    kubernetes_validate.validate(manifest, version, strict=True)


def test_names_in_the_manifest_lead_to_what_is_there() -> None:
    found = {m.values[0]["kind"]: m.values[0] for m in MANIFESTS}
    pod = found["Deployment"]["spec"]["template"]
    assert found["Service"]["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert pod["spec"]["serviceAccountName"] == found["ServiceAccount"]["metadata"]["name"]
    claims = {v["persistentVolumeClaim"]["claimName"] for p in (pod, found["Pod"])
              for v in p["spec"]["volumes"] if "persistentVolumeClaim" in v}  # fmt: skip
    assert claims == {found["PersistentVolumeClaim"]["metadata"]["name"]}
    settings = dict(re.findall(r"--conf=([\w.]+)=(\S+)", " ".join(pod["spec"]["containers"][0]["command"])))
    ports = {str(port["port"]) for port in found["Service"]["spec"]["ports"]}
    for name, value in settings.items():
        if name.startswith("spark.gpu_ops."):
            assert name in NAMES, name
        if name.endswith(".port"):
            assert value.rpartition(":")[2] in ports, name


@pytest.mark.parametrize("name", ["compose.yaml", "compose.gpu.yaml"])
def test_what_a_compose_file_mounts_and_builds_is_there(name: str) -> None:
    compose = yaml.safe_load((FOLDER / name).read_text())
    for service, what in compose["services"].items():
        for mount in what.get("volumes", ()):
            source = mount.split(":")[0]
            assert source in compose["volumes"] or (FOLDER / source).exists(), (service, mount)
        for port in what.get("ports", ()):
            assert port.startswith("127.0.0.1:"), (service, port)
        if "build" in what:
            assert (FOLDER / what["build"]["context"] / what["build"]["dockerfile"]).exists(), service
        elif "@" not in what["image"] and not what["image"].startswith("gpu-join:"):
            assert re.search(r":v?\d+\.\d+\.\d+$", what["image"]), f"{service}: {what['image']} is not pinned"


def test_secrets_are_of_the_driver_alone_and_the_image_has_the_jars() -> None:
    """Passwords of jobs stood in their text, in a ConfigMap."""
    found = {m.values[0]["kind"]: m.values[0] for m in MANIFESTS}
    (driver,) = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    ((secret,),) = (source.values() for source in driver["envFrom"])
    text = (FOLDER / "kubernetes" / "job.yaml").read_text()
    assert f"kubectl create secret generic {secret['name']} --from-literal=" in text
    assert "envFrom" not in found["Pod"]["spec"]["containers"][0]
    image, with_card = ((FOLDER / f"{name}.Dockerfile").read_text() for name in ("cpu", "gpu"))
    for lines in PACKAGES.values():
        group, name, version = lines["4.2"].split(":")
        assert f"/{group.replace('.', '/')}/{name}/{version}/{name}-{version}.jar" in image
    assert "/postgresql-" in image
    jars = Path(__file__).parent / "services" / "spark.xml"
    # all but those of Spark's own tests
    needed = re.findall(
        r"<artifactId>([\w.-]+)</artifactId><version>([\d.]+)</version>(?!\s*<classifier>tests)", jars.read_text()
    )
    assert len(needed) >= 7
    for name, version in needed:
        added = rf"ADD --checksum=sha256:[0-9a-f]{{64}} [^\n]*\n.*/{name}/{version}/{name}-{version}.jar"
        assert re.search(added, image)
        assert name.startswith("delta") or re.search(added, with_card)
    assert all(",delta,iceberg,kafka]'" in one for one in (image, with_card))
