"""Additions to the pods of a pool or of the gateway: variables, volumes, and a patch of the whole pod."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final

from pydantic import Field, StringConstraints

from hetero_api.spec_types import Form, ObjectName, Rule, SpecModel

OUR_VARIABLES: Final = ("HOME", "POD_IP", "POD_NAME")
OUR_PREFIX: Final = "HETERO_"
OUR_FOLDERS: Final = ("/dev/shm", "/etc/hetero", "/tmp", "/var/lib/hetero")
_OPEN_OBJECT: Final = {"x-kubernetes-preserve-unknown-fields": True}

VariableName = Annotated[
    str,
    Form("^[A-Za-z_][A-Za-z0-9_]*$", "must be a variable's name: letters, digits and '_'"),
    StringConstraints(max_length=128),
]
Variables = Annotated[dict[VariableName, Annotated[str, StringConstraints(max_length=1024)]], Field(max_length=32)]
PodPatch = Annotated[dict[str, Any], Field(json_schema_extra=_OPEN_OBJECT)]
MountPath = Annotated[
    str,
    Form(r"^(/[^/:\x00-\x1f]+)+$", "must be an absolute path below /, without ':' and without '/' at its end"),
    StringConstraints(max_length=256),
]


def is_our_variable(name: str) -> bool:
    """Return whether the operator sets a variable."""
    return name.startswith(OUR_PREFIX) or name in OUR_VARIABLES


def leaves_our_variables(field: str) -> Rule:
    """Return the rule that no variable is one that the operator sets."""
    quoted = ", ".join(f"'{name}'" for name in OUR_VARIABLES)
    others = f"!k.startsWith('{OUR_PREFIX}') && !(k in [{quoted}])"

    def holds(model: object) -> bool:
        names: dict[str, str] | None = getattr(model, field)
        return not any(map(is_our_variable, names or ()))

    return Rule(
        field,
        f"!has(self.{field}) || self.{field}.all(k, {others})",
        f"must hold none of {OUR_PREFIX}*, {', '.join(OUR_VARIABLES)}: these are the operator's",
        holds,
    )


class VolumeSpec(SpecModel):
    """A volume that is mounted read-only in every container of a pod."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "name",
            "(has(self.secretName) ? 1 : 0) + (has(self.configMapName) ? 1 : 0) + (has(self.claimName) ? 1 : 0) == 1",
            "needs one of secretName, configMapName and claimName",
            lambda volume: (
                sum(source is not None for source in (volume.secret_name, volume.config_map_name, volume.claim_name))
                == 1
            ),
        ),
        Rule(
            "mountPath",
            " && ".join(
                f"self.mountPath != '{folder}' && !self.mountPath.startsWith('{folder}/')" for folder in OUR_FOLDERS
            ),
            f"must not be in {', '.join(OUR_FOLDERS)}: these are the operator's",
            lambda volume: not f"{volume.mount_path}/".startswith(tuple(f"{folder}/" for folder in OUR_FOLDERS)),
        ),
    )

    name: Annotated[str, Form("^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "must be of lower-case letters, digits and '-'"),
                    StringConstraints(max_length=40)]  # fmt: skip
    """Name of the volume."""
    mount_path: MountPath
    """Folder that it becomes in every container."""
    secret_name: ObjectName | None = None
    """Secret whose keys are its files, e.g. certificates of a proxy."""
    config_map_name: ObjectName | None = None
    """ConfigMap whose keys are its files."""
    claim_name: ObjectName | None = None
    """PersistentVolumeClaim that it is."""


Volumes = Annotated[list[VolumeSpec], Field(max_length=8)]
