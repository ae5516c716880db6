"""containerd of one node: its settings, its images.

Images are imported once a cluster. Other nodes get them by hard links, so that memory and disk hold them once: three
nodes would else read torch three times, and two cores unpack it three times.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.harness.image_archive import PAUSE
from tests.e2e.harness.programs import NodePrograms
from tests.support.kube.debian import run

IMAGES = "k8s.io"
"""containerd's namespace of what the kubelet uses."""
_RECORDS = "*.db"


@dataclass(frozen=True, slots=True)
class Runtime:
    """Everything of it is in `folder`, whose path must be short: sockets have 107 characters."""

    folder: Path
    programs: NodePrograms

    @property
    def socket(self) -> Path:
        return self.folder / "containerd.sock"

    @property
    def _root(self) -> Path:
        return self.folder / "root"

    @property
    def state(self) -> Path:
        """Folder of what containerd knows of containers that run."""
        return self.folder / "state"

    @property
    def _registries(self) -> Path:
        return self.folder / "registries"

    @property
    def endpoint(self) -> str:
        return f"unix://{self.socket}"

    def configure(self, *, pods: str, bridge: str) -> list[str]:
        """Write the settings; the command line of the daemon. `pods` is the range of the pods' addresses."""
        plugins = self.folder / "cni"
        plugins.mkdir(parents=True)
        (plugins / "10-pods.conflist").write_text(json.dumps(self._network(pods, bridge), indent=1), encoding="utf-8")
        settings = self.folder / "containerd.toml"
        settings.write_text(self._settings(plugins), encoding="utf-8")
        return [str(self.programs.containerd), "--config", str(settings)]

    def serves(self) -> bool:
        """Whether the daemon answers."""
        try:
            self._ctr("version")
        except Exception:
            return False
        return True

    def load(self, archive: Path) -> None:
        """Import a docker or OCI archive under the names that it has."""
        self._ctr("--namespace", IMAGES, "images", "import", str(archive))

    def trust_plain_http(self, registry: str) -> None:
        """Pull from the registry at HOST:PORT without TLS, from now on."""
        folder = self._registries / registry
        folder.mkdir(parents=True)
        # A `server` alone is not read by containerd 1.6.
        (folder / "hosts.toml").write_text(f'[host."http://{registry}"]\ncapabilities = ["pull", "resolve"]\n')

    def link_images(self, other: Runtime) -> None:
        """Take over the images of another node. Both daemons must be stopped.

        Blobs and layers never change once they are there. The records of what is there do, so they are copied.
        """
        run(["cp", "--archive", "--link", str(other._root), str(self._root)])
        for record in self._root.glob(f"*/{_RECORDS}"):
            content = record.read_bytes()
            record.unlink()
            record.write_bytes(content)

    def _ctr(self, *arguments: str) -> str:
        return run([str(self.programs.ctr), "--address", str(self.socket), *arguments])

    def _network(self, pods: str, bridge: str) -> dict[str, object]:
        ipam = {
            "type": "host-local",
            "dataDir": str(self.folder / "addresses"),
            "ranges": [[{"subnet": pods}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        }
        # No masquerading: nodes and machine have routes to the pods.
        plugin = {
            "type": "bridge",
            "bridge": bridge,
            "isGateway": True,
            "ipMasq": False,
            "hairpinMode": True,
            "ipam": ipam,
        }
        ports = {"type": "portmap", "capabilities": {"portMappings": True}}
        return {"cniVersion": "0.4.0", "name": "pods", "plugins": [plugin, ports]}

    def _settings(self, plugins: Path) -> str:
        cri = 'plugins."io.containerd.grpc.v1.cri"'
        # restrict_oom_score_adj: root in a container has no CAP_SYS_RESOURCE and could start no pod without it.
        # netns_mounts_under_state_dir: nothing of a pod is outside of this folder.
        return f"""\
version = 2
root = "{self._root}"
state = "{self.state}"
[grpc]
  address = "{self.socket}"
[{cri}]
  sandbox_image = "{PAUSE}"
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  [{cri}.containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [{cri}.containerd.runtimes.runc.options]
      BinaryName = "{self.programs.runc}"
  [{cri}.cni]
    bin_dir = "{self.programs.cni}"
    conf_dir = "{plugins}"
  [{cri}.registry]
    config_path = "{self._registries}"
"""
