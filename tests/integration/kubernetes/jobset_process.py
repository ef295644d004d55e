"""JobSet's controller on loopback beside a control plane, without its webhooks: a test writes every default itself."""

import os
import subprocess
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.integration.kubernetes.control_plane import ControlPlane
from tests.integration.kubernetes.jobset_build import JobSetBinary
from tests.ports import free_ports

JOBSETS = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/default/jobsets"


class JobSetManager:
    """Starts on construction; `stop` ends it."""

    def __init__(self, binary: JobSetBinary, plane: ControlPlane, folder: Path) -> None:
        self.plane = plane
        webhook, self._health = free_ports(2)
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "9", "-subj", "/CN=jobset"]
        command += ["-keyout", "tls.key", "-out", "tls.crt"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=60)
        definition = yaml.load(binary.definition.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
        plane.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition)
        plane.until("JobSet's kind", lambda: plane.http.get(JOBSETS).status_code == 200)
        config = {
            "apiVersion": "config.jobset.x-k8s.io/v1alpha1",
            "kind": "Configuration",
            "leaderElection": {"leaderElect": False},
            "internalCertManagement": {"enable": False},
            "health": {"healthProbeBindAddress": f"127.0.0.1:{self._health}"},
            "metrics": {"bindAddress": "0"},
            "webhook": {"host": "127.0.0.1", "port": webhook, "certDir": str(folder)},
        }
        (folder / "jobset.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        self._log = folder / "jobset.log"
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                [str(binary.manager), f"--config={folder / 'jobset.yaml'}"],
                stdout=log,
                stderr=log,
                env=os.environ | {"KUBECONFIG": str(plane.kubeconfig)},
                start_new_session=True,
            )
        try:
            plane.until("JobSet", self._is_ready)
        except BaseException:
            self.stop()
            raise

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, self._log.read_text(errors="replace")[-3000:]
        try:
            return httpx.get(f"http://127.0.0.1:{self._health}/healthz").status_code == 200
        except httpx.HTTPError:
            return False

    def submit(self, name: str, template: dict[str, Any], pods: int) -> None:
        """A JobSet of two Jobs with `pods` pods each."""
        job = {"parallelism": pods, "completions": pods, "completionMode": "Indexed", "backoffLimit": 0}
        rows = [{"name": "worker", "replicas": 2, "template": {"spec": {**job, "template": template}}}]
        spec = {
            "replicatedJobs": rows,
            "suspend": False,
            "successPolicy": {"operator": "All"},
            "network": {"enableDNSHostnames": False},
        }
        self.plane.create(
            JOBSETS,
            {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": name}, "spec": spec},
        )

    def read(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.plane.http.get(f"{JOBSETS}/{name}").json()
        return found

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
