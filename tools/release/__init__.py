"""A release: wheels, sources, chart, images, bills of materials, notes and checksums; and its way to a registry.

sources    the commit that a release is made of
notes      sections of CHANGELOG.md
wheels     the wheels, one an architecture, and the source distribution
chart      the chart as a file, and as what an OCI registry takes
layout     folders that skopeo copies from and to
signing    signatures in cosign's format
registry   pushing, by skopeo

python -m tools.release cut | build | push; docs/releases.md
"""
