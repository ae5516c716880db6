"""The container images: what they are, how they are built, measured and tried out.

catalogue    which images there are, and what the chart calls them
settings     what is set from outside
builders     docker, podman or buildah, behind one face
base         a base image made on this machine, where no registry is in reach
sizes        what each image adds to its base, against what was recorded
trial        a command in an image, as a restricted pod would run it
locks        the hashed locks that images are built of
archive      an image as an archive that is the same bytes for the same content
contents     which packages an image has, and which of its files are whose
sbom         the bill of materials of an image
audit        an image against its lock and its bill of materials; advisories
packages     runs inside a build; imports nothing of the others

python -m tools.images build | sizes | base | locks | audit
"""
