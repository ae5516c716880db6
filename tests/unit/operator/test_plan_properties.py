"""What holds for every spec: a plan leads to where there is nothing left to plan, from wherever it starts."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from hetero_api.errors import ManifestError
from hetero_api.manifest import parse_resource
from hetero_operator.reconcile.revision import revisions_of
from tests.support.examples import examples
from tests.support.operator_world import OperatorWorld
from tests.support.render_cases import FULL, OLD, PLAIN, UPGRADED, resource_of

GIB = st.integers(1, 512).map(lambda amount: f"{amount}Gi")
SIZES = st.one_of(GIB, st.integers(1024, 4096).map(lambda amount: f"{amount}Mi"))
NAMES = st.sampled_from(["a", "b-1", "x.y"])
LABELS = st.dictionaries(
    st.sampled_from(["team", "example.com/zone", "tier"]), st.sampled_from(["", "a", "1"]), max_size=2
)
URIS = st.sampled_from([
    "hf://org/name", "hf://org/name:Q8_0", "pvc://claim/some/path", "pvc://claim/some/tiny-Q8_0.gguf",
    "pvc://claim", "file:///srv/model", "oci://registry.example/m:1", "oci://registry.example/m:1#/weights",
])  # fmt: skip


def optional(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A section with any of its fields."""
    return st.fixed_dictionaries({}, optional=fields)


TOLERATIONS = st.lists(st.fixed_dictionaries({"key": NAMES, "operator": st.just("Exists")}), max_size=2)
PLACES = optional(nodeSelector=LABELS, tolerations=TOLERATIONS)
CPU = optional(
    coresPerRank=st.integers(1, 64),
    memoryPerRank=SIZES,
    hugepages=st.fixed_dictionaries({"size": st.sampled_from(["2Mi", "1Gi"]), "perRank": GIB}),
    numa=optional(policy=st.sampled_from(["Required", "BestEffort", "None"])),
)
GPU = optional(coresPerRank=st.integers(1, 8), memoryPerRank=SIZES, runtimeClassName=NAMES)


@st.composite
def pools(draw: st.DrawFn, names: list[tuple[str, str]]) -> list[dict[str, Any]]:
    made = []
    for name, kind in names:
        pods, ranks_per_pod = draw(st.integers(1, 3)), draw(st.integers(1, 3))
        pool = {"name": name, "type": kind, "ranks": pods * ranks_per_pod, "ranksPerPod": ranks_per_pod}
        pool |= draw(
            optional(sharedMemory=SIZES, scheduling=PLACES, **({"gpu": GPU} if kind == "GPU" else {"cpu": CPU}))
        )
        made.append(pool)
    return made


@st.composite
def specs(draw: st.DrawFn, names: list[tuple[str, str]]) -> dict[str, Any]:
    sections = optional(
        engine=optional(maxNumSeqs=st.integers(1, 64), enforceEager=st.booleans(), batchInvariant=st.booleans()),
        gateway=optional(
            service=optional(port=st.integers(1, 65535), type=st.sampled_from(["ClusterIP", "NodePort"])),
            resources=optional(cpuMillis=st.integers(10, 4000), memory=SIZES),
            drainTimeoutSeconds=st.integers(0, 100),
        ),
        recovery=optional(startupTimeoutSeconds=st.integers(30, 4000), maxRestarts=st.integers(0, 9)),
        scheduling=optional(
            nodeSelector=LABELS, tolerations=TOLERATIONS, priorityClassName=st.sampled_from(["high", "low"])
        ),
        images=optional(pullPolicy=st.sampled_from(["Always", "Never"]), pullSecrets=st.just(["mirror"])),
        podMetadata=optional(labels=LABELS, annotations=LABELS),
        networkPolicy=optional(
            enabled=st.booleans(), allowModelEgress=st.booleans(), metricsFrom=st.just(["monitoring"])
        ),
        disruptionBudget=optional(enabled=st.booleans()),
        monitoring=optional(podMonitor=st.booleans(), intervalSeconds=st.integers(1, 60)),
        suspend=st.booleans(),
        replicas=st.integers(0, 1),
    )
    spec = {"model": {"uri": draw(URIS)}, "pools": draw(pools(names)), **draw(sections)}
    if spec.get("gateway", {}).get("service", {}).get("type") == "NodePort":
        spec["gateway"]["auth"] = {"mode": "None"}  # Strangers reach it, which must be said in as many words.
    return in_one_pod(spec) if draw(st.booleans()) else spec


def in_one_pod(spec: dict[str, Any]) -> dict[str, Any]:
    """The same with all ranks in one pod, and without what its pools may not differ in."""
    places = spec["pools"][0].get("scheduling", {})
    together = []
    for pool in spec["pools"]:
        settings = {"memoryPerRank": "1Gi", **pool.get(pool["type"].lower(), {})}
        kept = {key: value for key, value in settings.items() if key not in ("hugepages", "runtimeClassName")}
        together.append({**pool, "scheduling": places, pool["type"].lower(): kept})
    return {**spec, "pools": together, "topology": {"colocate": "Pod"}}


@st.composite
def valid_pairs(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two valid specs of the same pools."""
    kinds = draw(st.lists(st.sampled_from(["GPU", "CPU"]), min_size=1, max_size=3))
    names = [(f"p{index}", kind) for index, kind in enumerate(kinds)]
    pair = draw(specs(names)), draw(specs(names))
    assume(all(map(is_valid, pair)))
    return pair


def is_valid(spec: dict[str, Any]) -> bool:
    try:
        parse_resource(resource_of("x", spec))
    except ManifestError:
        return False
    return True


QUICK = settings(max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
CLUSTERS = st.sampled_from([FULL, PLAIN, OLD])


@QUICK
@given(pair=valid_pairs(), cluster=CLUSTERS)
def test_from_nothing_and_from_any_other_spec_everything_comes_to_rest(pair: Any, cluster: Any) -> None:
    for first, second in (pair, pair[::-1]):
        world = OperatorWorld(resource_of("x", first), cluster)
        world.reconcile()
        world.change(second)
        world.reconcile()
        fresh = OperatorWorld(resource_of("x", second), cluster)
        fresh.reconcile()
        assert world.pods.keys() == fresh.pods.keys()
        assert world.objects.keys() == fresh.objects.keys()
        world.options = UPGRADED
        assert world.plan().idle


@QUICK
@given(pair=valid_pairs())
def test_what_an_api_server_adds_to_a_spec_changes_no_revision(pair: Any) -> None:
    resource = resource_of("x", pair[0])
    spec = parse_resource(resource).spec
    stored = copy.deepcopy(resource)
    stored["spec"] = spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    assert revisions_of(stored, parse_resource(stored).spec) == revisions_of(resource, spec)


@QUICK
@given(pair=valid_pairs(), data=st.data())
def test_whatever_part_of_a_plan_is_done_the_rest_is_planned_again(pair: Any, data: st.DataObject) -> None:
    """The operator is killed after any call: the next one ends where the first would have."""
    whole, cut = OperatorWorld(resource_of("x", pair[0]), FULL), OperatorWorld(resource_of("x", pair[0]), FULL)
    whole.reconcile()
    for world in (whole, cut):
        world.change(pair[1])
    whole.reconcile()
    for _ in range(3):
        todo = cut.plan()
        cut.act_partly(todo, calls=data.draw(st.integers(0, 20)))
        cut.run_controllers()
    cut.reconcile()
    assert cut.objects.keys() == whole.objects.keys()
    assert cut.pods.keys() == whole.pods.keys()
    assert {name: item["spec"] for name, item in cut.pods.items()} == {
        name: item["spec"] for name, item in whole.pods.items()
    }
