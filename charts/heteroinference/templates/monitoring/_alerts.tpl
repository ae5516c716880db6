{{/*
Alerts about the operator, on metrics that hetero_operator/metrics.py exports. `$of` selects the pods of this release by the
labels that a ServiceMonitor gives.
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
{{- end -}}
