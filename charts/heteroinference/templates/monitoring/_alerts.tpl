{{/*
Alerts about the operator and about groups; protos/hetero_api/metrics.py has their metrics, docs/troubleshooting.md an entry for
each. `$of` selects the operator's pods of this release by the labels that a ServiceMonitor gives. Groups are those of all
releases that Prometheus scrapes.
*/}}
{{- define "heteroinference.alerts" -}}
{{- $in := printf "namespace=%q,service=%q" .Release.Namespace (printf "%s-metrics" (include "heteroinference.operator" .)) -}}
{{- $of := printf "{%s}" $in -}}
- alert: HeteroInferenceOperatorDown
  expr: absent(hetero_operator_leader{{ $of }})
  for: 5m
  severity: critical
  summary: No HeteroInference operator runs.
  description: >-
    Prometheus sees no pod of the operator. What serves goes on serving, but nobody carries out changes, replaces pods on
    dead nodes or tells the state of resources.
- alert: HeteroInferenceOperatorHasNoLeader
  expr: sum(hetero_operator_leader{{ $of }}) < 1
  for: 2m
  severity: critical
  summary: No HeteroInference operator leads.
  description: >-
    Pods of the operator run, but none holds the Lease, so none does anything. Their logs say why: the API server cannot be
    reached, or the Lease may not be read or written.
- alert: HeteroInferenceOperatorHasTwoLeaders
  expr: sum(hetero_operator_leader{{ $of }}) > 1
  for: 1m
  severity: critical
  summary: More than one HeteroInference operator leads.
  description: >-
    Pods of the operator hold the same Lease at the same time. Delete all but one of them, and report this: it must not happen.
- alert: HeteroInferenceReconcileErrors
  expr: sum by (reason) (rate(hetero_operator_reconcile_errors_total{{ $of }}[10m])) > 0
  for: 15m
  severity: warning
  summary: '{{ `HeteroInference resources cannot be carried out: {{ $labels.reason }}.` }}'
  description: >-
    {{ `For 15 minutes the operator could not do what resources ask for, {{ $value | humanize }} times a second. The condition` }}
    Accepted of the resources and the operator's log name the objects and what the API server said.
- alert: HeteroInferenceOperatorForbidden
  expr: sum by (verb) (increase(hetero_operator_api_requests_total{ {{- $in }},code="403"}[10m])) > 0
  for: 5m
  severity: warning
  summary: '{{ `The HeteroInference operator is refused the verb {{ $labels.verb }}.` }}'
  description: >-
    A quota or an admission policy refuses what it writes, or its roles are not those of this version of the chart.
- alert: HeteroInferenceWatchesRestart
  expr: sum by (kind) (increase(hetero_operator_watch_restarts_total{ {{- $in }},reason="error"}[15m])) > 10
  for: 5m
  severity: warning
  summary: '{{ `The HeteroInference operator cannot watch {{ $labels.kind }} objects.` }}'
  description: >-
    Watches fail again and again, so changes are seen late. The API server is overloaded or away, or the operator may not
    watch this kind.
- alert: HeteroInferenceQueueWaits
  expr: max(hetero_operator_queue_oldest_seconds{{ $of }}) > 60
  for: 5m
  severity: warning
  summary: Changes of HeteroInference resources wait over a minute for the operator.
  description: >-
    The operator has more to do than it manages: the API server answers slowly, or `workers` or the CPU of its pods are too few.
- alert: HeteroInferenceGroupNotReady
  expr: hetero_ready == 0
  for: 10m
  severity: critical
  summary: '{{ `The gateway {{ $labels.namespace }}/{{ $labels.pod }} has not served for ten minutes.` }}'
  description: >-
    Requests wait or are refused. The resource's conditions name the first rank that is missing, and why.
- alert: HeteroInferenceRankMissing
  expr: hetero_rank_info == 0
  for: 10m
  severity: warning
  summary: '{{ `Rank {{ $labels.rank }} of pool {{ $labels.pool }} in {{ $labels.namespace }} has not joined its gateway.` }}'
  description: >-
    A group serves only with all of its ranks. The pod's state, or the rank's log, says why it is missing.
- alert: HeteroInferenceGroupRecoversOften
  expr: increase(hetero_recoveries_total[1h]) > 3
  for: 1m
  severity: warning
  summary: '{{ `The group of {{ $labels.namespace }}/{{ $labels.pod }} lost ranks {{ $value | humanize }} times within an hour.` }}'
  description: >-
    Requests went on each time, and waited for it. The gateway's log has the reason of each loss.
- alert: HeteroInferenceRankRestartsOften
  expr: increase(hetero_rank_restarts_total[1h]) > 3
  for: 1m
  severity: warning
  summary: '{{ `A rank of {{ $labels.namespace }}/{{ $labels.pod }} was restarted {{ $value | humanize }} times within an hour.` }}'
  description: >-
    Its process ended, or hung and was killed. The pod's log has what it said.
- alert: HeteroInferenceRequestsWait
  expr: min_over_time(vllm:num_requests_waiting[10m]) > 0 and on (namespace, instance) hetero_ready == 1
  for: 5m
  severity: warning
  summary: '{{ `Requests of {{ $labels.model_name }} in {{ $labels.namespace }} have waited without a break for ten minutes.` }}'
  description: >-
    More is asked for than the group can do at once: its slots or its KV cache are full all the time.
- alert: HeteroInferencePreemptions
  expr: rate(vllm:num_preemptions_total[10m]) > 0.1 and on (namespace, instance) hetero_ready == 1
  for: 10m
  severity: warning
  summary: '{{ `The KV cache of {{ $labels.model_name }} in {{ $labels.namespace }} is too small for its load.` }}'
  description: >-
    Requests are preempted {{ `{{ $value | humanize }}` }} times a second and computed again, for want of KV blocks.
- alert: HeteroInferenceSlowerThanPredicted
  expr: hetero_placement_step_time_ratio > 1.5
  for: 30m
  severity: warning
  summary: '{{ `Decode steps of {{ $labels.namespace }}/{{ $labels.pod }} take {{ $value | humanize }} times as long as predicted.` }}'
  description: >-
    Something else uses the cores or the memory of the ranks, or they are slower than when they were measured.
- alert: HeteroInferenceMemoryNotLocal
  expr: hetero_rank_local_memory_ratio < 0.9
  for: 10m
  severity: warning
  summary: '{{ `Rank {{ $labels.rank }} in {{ $labels.namespace }} has {{ $value | humanizePercentage }} of its memory on its own NUMA nodes.` }}'
  description: >-
    The rest is read over the link between sockets, at a fraction of the speed.
{{- end -}}
