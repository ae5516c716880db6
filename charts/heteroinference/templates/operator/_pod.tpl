{{/* Parts of the operator's pod that are decisions, not plain fields. */}}

{{/* Settings, as hetero_operator/config.py reads them; a name that it does not know would be no setting at all. */}}
{{- define "heteroinference.operatorEnv" -}}
- name: HETERO_OPERATOR_NAMESPACES
  value: {{ join "," .Values.watchNamespaces | quote }}
- name: HETERO_OPERATOR_GATEWAY_IMAGE
  value: {{ include "heteroinference.image" (dict "root" . "image" .Values.images.gateway) | quote }}
- name: HETERO_OPERATOR_ROUTER_IMAGE
  value: {{ include "heteroinference.image" (dict "root" . "image" .Values.images.router) | quote }}
- name: HETERO_OPERATOR_CPU_WORKER_IMAGE
  value: {{ include "heteroinference.image" (dict "root" . "image" .Values.images.cpuWorker) | quote }}
- name: HETERO_OPERATOR_GPU_WORKER_IMAGE
  value: {{ include "heteroinference.image" (dict "root" . "image" .Values.images.gpuWorker) | quote }}
- name: HETERO_OPERATOR_CLUSTER_DOMAIN
  value: {{ .Values.clusterDomain | quote }}
- name: HETERO_OPERATOR_RUN_AS_USER
  value: {{ .Values.runAsUser | int64 | quote }}
- name: HETERO_OPERATOR_INSIDE_TLS
  value: {{ .Values.insideTls | quote }}
- name: HETERO_OPERATOR_NAMESPACE_USERS
  value: {{ .Values.namespaceUsers | quote }}
- name: HETERO_OPERATOR_CLUSTER_DNS
  value: {{ join "," .Values.clusterDns | quote }}
- name: HETERO_OPERATOR_API_SERVER_PORTS
  value: {{ join "," .Values.networkPolicy.apiServerPorts | quote }}
- name: HETERO_OPERATOR_ALLOWED_HOST_PATHS
  value: {{ join "," .Values.policy.hostPaths | quote }}
- name: HETERO_OPERATOR_ALLOWED_IMAGES
  value: {{ join "," .Values.policy.images | quote }}
- name: HETERO_OPERATOR_ALLOWED_SECRETS
  value: {{ join "," .Values.policy.secrets | quote }}
- name: HETERO_OPERATOR_ALLOWED_PRIORITY_CLASSES
  value: {{ join "," .Values.policy.priorityClasses | quote }}
- name: HETERO_OPERATOR_ALLOWED_SCHEDULERS
  value: {{ join "," .Values.policy.schedulers | quote }}
- name: HETERO_OPERATOR_ALLOWED_RUNTIME_CLASSES
  value: {{ join "," .Values.policy.runtimeClasses | quote }}
- name: HETERO_OPERATOR_OWN_NAMESPACE
  valueFrom:
    fieldRef:
      fieldPath: metadata.namespace
- name: HETERO_OPERATOR_IDENTITY
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
- name: HETERO_OPERATOR_LEASE_NAME
  value: {{ include "heteroinference.operator" . }}
- name: HETERO_OPERATOR_LEASE_NAMESPACE
  value: {{ .Release.Namespace | quote }}
- name: HETERO_OPERATOR_LEASE_SECONDS
  value: {{ .Values.leaderElection.leaseSeconds | quote }}
- name: HETERO_OPERATOR_LEASE_RENEW_SECONDS
  value: {{ .Values.leaderElection.renewSeconds | quote }}
- name: HETERO_OPERATOR_LEASE_RETRY_SECONDS
  value: {{ .Values.leaderElection.retrySeconds | quote }}
- name: HETERO_OPERATOR_HOST
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
- name: HETERO_OPERATOR_METRICS_PORT
  value: "8080"
- name: HETERO_OPERATOR_HEALTH_PORT
  value: "8081"
- name: HETERO_OPERATOR_RESYNC_SECONDS
  value: {{ .Values.resyncSeconds | quote }}
- name: HETERO_OPERATOR_WORKERS
  value: {{ .Values.workers | quote }}
- name: HETERO_OPERATOR_LOG_LEVEL
  value: {{ .Values.logLevel }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "heteroinference.affinity" -}}
{{- if .Values.affinity -}}
{{- toYaml .Values.affinity -}}
{{- else -}}
podAntiAffinity:
  preferredDuringSchedulingIgnoredDuringExecution:
    - weight: 100
      podAffinityTerm:
        topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels:
            {{- include "heteroinference.selector" . | nindent 12 }}
{{- end -}}
{{- end -}}

{{- define "heteroinference.spread" -}}
{{- if .Values.topologySpreadConstraints -}}
{{- toYaml .Values.topologySpreadConstraints -}}
{{- else -}}
- maxSkew: 1
  topologyKey: topology.kubernetes.io/zone
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels:
      {{- include "heteroinference.selector" . | nindent 6 }}
{{- end -}}
{{- end -}}

{{/* Entries of clusterDns as peers of a NetworkPolicy. */}}
{{- define "heteroinference.dnsPeers" -}}
{{- range . }}
{{- if contains "=" . }}
{{- $parts := splitn "/" 2 . }}
{{- $label := splitn "=" 2 $parts._1 }}
- namespaceSelector:
    matchLabels:
      kubernetes.io/metadata.name: {{ $parts._0 | quote }}
  podSelector:
    matchLabels:
      {{ $label._0 | quote }}: {{ $label._1 | quote }}
{{- else }}
- ipBlock:
    cidr: {{ . | quote }}
{{- end }}
{{- end }}
{{- end -}}
